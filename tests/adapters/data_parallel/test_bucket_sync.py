"""Megatron's data-parallel training on four ranks: equal with the plugin bit by bit."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from megatron_overlap.adapters.data_parallel import bucket_sync
from megatron_overlap.config import OverlapConfig
from megatron_overlap.counters import FallbackError
from megatron_overlap.session import Session
from tests.adapters.conftest import RANKS
from tests.adapters.data_parallel import bucket_sync_workers as cases
from tests.adapters.data_parallel.bucket_sync_workers import Run
from tests.helpers.releases import OLDEST, ROOT, release_environment
from tests.helpers.te import needs_te
from tests.helpers.world import World, assert_same

P2P = (("method", "p2p"),)
STEPS = "step of a bucket, then its gather"


@pytest.fixture(scope="module")
def ranks() -> Iterator[World]:
    """Workers of their own: Megatron's classes and groups, once made in a process, stay."""
    workers = World(RANKS, answer_s=120, adapted=True)
    workers.run(RANKS, cases.start)
    yield workers
    workers.close()


@pytest.mark.parametrize("late", [False, True], ids=["gloo", "late"])
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("sharded", [True, False], ids=["sharded", "plain"])
def test_equal_to_stock(ranks: World, precision: str, sharded: bool, late: bool) -> None:
    """Four steps of two micro-batches with clipping; an evaluation after the second step reads the parameters."""
    stock = Run(precision, sharded, evaluate=(1,) if sharded else ())
    counts = ranks.run(RANKS, cases.compared, replace(stock, data=P2P, late=late), stock)
    assert_same(counts)
    done = counts[0]["overlapped"]
    assert counts[0]["reasons"] == []
    if not sharded:
        assert done == {"all_reduce": 4 * 4}
        return
    assert counts[0]["under_way"] == [[True] * 4] * 4, "all all-gathers start in the step"
    assert done == {"reduce_scatter": 4 * 4, "all_gather": 4 * 4, STEPS: 4 * 4}


@pytest.mark.parametrize("counts_steps", [False, True])
def test_gathers_outlast_the_step_only_in_a_loop_that_counts_steps(ranks: World, counts_steps: bool) -> None:
    """Other loops may copy the parameters or free their memory after the step."""
    complete = ranks.run(RANKS, cases.are_gathered, counts_steps=counts_steps)
    assert complete == [not counts_steps] * RANKS


@pytest.mark.parametrize("data", [P2P, (("method", "none"),)], ids=["p2p", "collectives"])
def test_ranks_with_another_order_of_gradients(ranks: World, data: tuple[tuple[str, object], ...]) -> None:
    """Overlap may change the order on some ranks: the reductions of all buckets start in one order all the same."""
    stock = Run(sharded=False)
    counts = ranks.run(RANKS, cases.compared, replace(stock, data=data, tensor="p2p", reordered=True), stock)
    assert "VocabParallelEmbedding" not in counts[0]["left"], "one tensor-parallel rank does not communicate"


def test_the_first_layers_are_stepped_first(ranks: World) -> None:
    assert ranks.run(RANKS, cases.order_of_steps) == [[[0], [1, 2], [3], [4, 5]]] * RANKS


def test_bytes_are_those_of_the_collectives(ranks: World) -> None:
    """A rank sends the gradients of the others' shards, in fp32, and its shard of the parameters to each, in bf16."""
    stock = Run("bf16", iterations=1)
    sent = ranks.run(RANKS, cases.compared, replace(stock, data=P2P), stock)[0]["bytes"]
    elements = sent // ((RANKS - 1) * (4 + 2)) * RANKS
    assert sum(cases.SIZES) + 5 * len(cases.SIZES) <= elements <= sum(cases.SIZES) + 5 * len(cases.SIZES) + 2000


def test_a_step_skipped_by_loss_scaling(ranks: World) -> None:
    """In the first iteration and later: no parameter changes, the scale is halved, and training continues."""
    stock = Run("fp16", overflow=(0, 2), iterations=5)
    counts = ranks.run(RANKS, cases.compared, replace(stock, data=P2P, late=True), stock)
    assert_same(counts)
    assert counts[0]["scale"] == 64 / 4
    assert counts[0]["overlapped"][STEPS] == 3 * 4
    assert [all(step) for step in counts[0]["under_way"]] == [False, True, False, True, True]


def test_an_optimizer_of_another_class_steps_as_a_whole(ranks: World) -> None:
    stock = Run(foreign_adam=True)
    counts = ranks.run(RANKS, cases.compared, replace(stock, data=P2P, late=True), stock)
    assert counts[0]["overlapped"] == {"reduce_scatter": 16, "all_gather": 16}
    assert "ForeignAdam" in counts[0]["left"]["step of the distributed optimizer"]


@pytest.fixture(scope="module")
def te_ranks() -> Iterator[World]:
    """Workers whose optimizer is TransformerEngine's FusedAdam."""
    workers = World(RANKS, answer_s=120, te=True)
    workers.run(RANKS, cases.start)
    yield workers
    workers.close()


@needs_te
@pytest.mark.parametrize(
    ("precision", "settings"),
    [("fp32", ()), ("bf16", ()), ("bf16", (("use_precision_aware_optimizer", True),))],
    ids=["fp32", "bf16", "precision_aware"],
)
def test_fused_adam_steps_by_bucket(te_ranks: World, precision: str, settings: tuple[tuple[str, object], ...]) -> None:
    """The step number belongs to a parameter group: four buckets advance it by one."""
    stock = Run(precision, optimizer=settings, evaluate=(1,))
    counts = te_ranks.run(RANKS, cases.compared, replace(stock, data=P2P, late=True), stock)
    assert_same(counts)
    assert counts[0]["overlapped"] == {"reduce_scatter": 4 * 4, "all_gather": 4 * 4, STEPS: 4 * 4}
    assert counts[0]["under_way"] == [[True] * 4] * 4


def test_an_unsupported_optimizer_steps_as_a_whole(ranks: World) -> None:
    stock = Run(offloaded=True)
    counts = ranks.run(RANKS, cases.compared, replace(stock, data=P2P, late=True), stock)
    assert counts[0]["overlapped"] == {"reduce_scatter": 16, "all_gather": 16}
    (left,) = counts[0]["left"].items()
    assert left[0] == "step of the distributed optimizer"
    assert "optimizer_cpu_offload" in left[1]


def test_experts_of_one_replica_step_as_a_whole(ranks: World) -> None:
    """Their bucket has no gather; the dense layers have three buckets."""
    stock = Run(experts=True)
    counts = ranks.run(RANKS, cases.compared, replace(stock, data=P2P, late=True), stock)
    assert counts[0]["overlapped"] == {"reduce_scatter": 4 * 3, "all_gather": 4 * 3, STEPS: 4 * 3}


def test_weights_that_are_clipped_after_the_step(ranks: World) -> None:
    """A gather that the step starts would send weights from before their clipping."""
    stock = Run(qk_clip=True)
    counts = ranks.run(RANKS, cases.compared, replace(stock, data=P2P, late=True), stock)
    assert counts[0]["overlapped"] == {"reduce_scatter": 16, "all_gather": 16}
    assert "qk_clip" in counts[0]["left"]["step of the distributed optimizer"]


@pytest.mark.parametrize("how", ["stock", "plugin"])
def test_bf16_gradients_summed_in_fp32(ranks: World, how: str) -> None:
    bf16_buffers = (("grad_reduce_in_fp32", False),)
    stock = Run("bf16", ddp=(*bf16_buffers, ("reduce_scatter_with_fp32_accumulation", True)))
    own = (*P2P, ("accumulate", "fp32"))
    mine = replace(stock, data=P2P) if how == "stock" else replace(stock, data=own, ddp=bf16_buffers)
    assert ranks.run(RANKS, cases.compared, mine, stock)[0]["overlapped"]["reduce_scatter"] == 16


def test_average_in_collective(ranks: World) -> None:
    """gloo has no mean, so the stock run scales the gradients before the sum."""
    mine = Run(data=P2P, ddp=(("average_in_collective", True),))
    ranks.run(RANKS, cases.compared, mine, Run())


OFF = (("overlap_grad_reduce", False), ("overlap_param_gather", False))


def test_a_missing_flag_is_the_reason(ranks: World) -> None:
    stock = Run(ddp=OFF)
    counts = ranks.run(RANKS, cases.compared, replace(stock, data=(("method", "auto"),), strict=False), stock)
    off = ["Megatron's --overlap-grad-reduce is off", "Megatron's --overlap-param-gather is off"]
    assert counts[0]["overlapped"] == {"all_gather": 0, "reduce_scatter": 0}
    assert counts[0]["reasons"] == off
    for text in ranks.run(RANKS, cases.error_of, replace(stock, data=P2P)):
        assert text == (
            "MissingFlagError: overlap.data.method: p2p: needs Megatron's --overlap-grad-reduce: "
            "add it to the launch, or use method auto"
        )
    for text in ranks.run(RANKS, cases.error_of, replace(stock, data=(("method", "auto"),))):
        assert text.startswith("FallbackError: data bucket of ")


def test_force_all_reduce_runs_the_stock_path(ranks: World) -> None:
    assert (
        ranks.run(RANKS, cases.saved_gradients)
        == [["Megatron reduces all gradients to save them (force_all_reduce)"]] * RANKS
    )


def test_the_module_of_megatron_is_not_changed(ranks: World) -> None:
    assert all(ranks.run(RANKS, cases.names_are_untouched))


def test_the_expected_release_runs(ranks: World) -> None:
    releases = ranks.run(RANKS, cases.start)
    wanted = os.environ.get("EXPECTED_MEGATRON")
    assert wanted is None or set(releases) == {wanted}


@pytest.mark.long
def test_the_oldest_release() -> None:
    """All tests above on the oldest release."""
    done = subprocess.run(
        [sys.executable, "-m", "pytest", __file__, "-k", "not oldest_release"],
        cwd=ROOT,
        env={**release_environment(OLDEST), "EXPECTED_MEGATRON": OLDEST},
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]
    assert " passed" in done.stdout


@pytest.mark.parametrize("patch", [bucket_sync.start_grad_sync, bucket_sync.start_param_sync])
@pytest.mark.parametrize(("method", "device", "stock"), [("auto", "cuda", True), ("auto", "cpu", False)])
def test_auto_is_nccl_on_cuda(patch: Any, method: str, device: str, stock: bool) -> None:
    """Nothing has measured p2p against the collectives of NCCL. The report has the reason, and it is no fallback."""
    session = Session(OverlapConfig.model_validate({"data": {"method": method}, "strict": True}))
    data = SimpleNamespace(is_cuda=device == "cuda", numel=lambda: 4)
    group = SimpleNamespace(size=lambda: 65)
    config = SimpleNamespace(
        use_distributed_optimizer=True,
        overlap_grad_reduce=True,
        overlap_param_gather=True,
        num_distributed_optimizer_instances=1,
    )
    bucket_group = SimpleNamespace(
        ddp_config=config,
        intra_distributed_optimizer_instance_group=group,
        buckets=[SimpleNamespace(grad_data=data, param_data=data)],
        param_gather_handle=None,
    )
    start = patch(lambda *_: "stock", session)
    if not stock:
        with pytest.raises(FallbackError):
            start(bucket_group)
        return
    assert start(bucket_group) == "stock"
    assert "p2p has not been measured on a GPU" in session.counters.excluded["data parallel buckets on CUDA"]
