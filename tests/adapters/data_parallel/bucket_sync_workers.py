"""Runs Megatron's data-parallel training with and without the plugin, on the same gradients.

The gradients are small whole numbers, so that every sum of them is exact in any order: what comes out must be equal
bit by bit. Megatron is imported inside the functions: in a worker, after the CPU adapter.
"""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from megatron_overlap import OverlapConfig, enable
from tests.helpers.late import LateTransport

SIZES = (96, 640, 33, 500, 128, 257)
"""Elements of each layer's weight: some buckets have several parameters, some parameters are in two shards."""


def start(group: dist.ProcessGroup) -> str:
    """Adapts Megatron to the CPU and makes its groups: all ranks are replicas, and each has its own experts.

    Returns Megatron's release.
    """
    if "megatron.core" not in sys.modules:
        from megatron_overlap.adapters import cpu

        cpu.install()
    from megatron.core import package_info, parallel_state

    if not parallel_state.model_parallel_is_initialized():
        parallel_state.initialize_model_parallel(expert_model_parallel_size=group.size())
    return str(package_info.__version__)


@dataclass(frozen=True)
class Run:
    """One training.

    Attributes:
        precision: of the parameters.
        sharded: with the distributed optimizer, else plain data parallelism.
        ddp, optimizer: further settings of Megatron's configs.
        data: the plugin's settings, None without the plugin.
        tensor: its method of tensor parallelism, which no layer of the model uses.
        reordered: ranks of odd number compute the layers, and so their gradients, in reverse.
        late: nothing has landed before it is waited for, and is NaN until then.
        overflow: iterations in which a gradient of the last rank is infinite.
        evaluate: iterations after which all parameters are looked at.
        foreign_adam: an optimizer of a class that the plugin does not know.
        offloaded: the optimizer says that its state is on the host.
        experts: the last layer is an expert.
        qk_clip: weights are scaled after each step, as by Megatron's `clip_qk`.
    """

    precision: str = "fp32"
    sharded: bool = True
    ddp: tuple[tuple[str, Any], ...] = ()
    optimizer: tuple[tuple[str, Any], ...] = ()
    data: tuple[tuple[str, Any], ...] | None = None
    tensor: str = "none"
    reordered: bool = False
    strict: bool = True
    late: bool = False
    overflow: tuple[int, ...] = ()
    evaluate: tuple[int, ...] = ()
    foreign_adam: bool = False
    offloaded: bool = False
    experts: bool = False
    qk_clip: bool = False
    iterations: int = 4


class ForeignAdam(torch.optim.AdamW):
    """An Adam of an unknown class."""


class _Timer:
    """In place of Megatron's timers; counts their barriers."""

    def __init__(self) -> None:
        self.barriers = 0

    def start(self, barrier: bool = False) -> None:
        self.barriers += barrier

    def stop(self) -> None:
        pass


def _model(precision: torch.dtype, reverse: bool) -> torch.nn.Module:
    class Layer(torch.nn.Module):
        def __init__(self, size: int) -> None:
            super().__init__()
            # Two dimensions: Megatron decays only such weights, so that the optimizer has two parameter groups.
            self.weight = torch.nn.Parameter(torch.linspace(-1, 1, size).to(precision)[:, None])
            self.bias = torch.nn.Parameter(torch.zeros(5, dtype=precision))

        def forward(self, total: torch.Tensor, factors: torch.Tensor) -> torch.Tensor:
            weight = (self.weight[:, 0] * factors[: self.weight.numel()].to(self.weight.dtype)).float().sum()
            return total + weight + (self.bias * factors[:5].to(self.bias.dtype)).float().sum()

    class Model(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = torch.nn.ModuleList(Layer(size) for size in SIZES)

        def forward(self, factors: torch.Tensor) -> torch.Tensor:
            terms = {
                number: self.layers[number](torch.zeros(()), factors.roll(number))
                for number in (reversed(range(len(SIZES))) if reverse else range(len(SIZES)))
            }
            total = torch.zeros(())
            for number in range(len(SIZES)):
                total = total + terms[number]
            return total

    return Model()


def _wrapped(run: Run) -> tuple[Any, Any]:
    """Megatron's data parallel model and its optimizer."""
    from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
    from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
    from megatron.core.transformer import TransformerConfig

    dtype = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}[run.precision]
    both = {"use_distributed_optimizer": run.sharded}
    flags = {"overlap_grad_reduce": True, "overlap_param_gather": run.sharded, "bucket_size": 400, **both}
    ddp = DistributedDataParallelConfig(**{**flags, "grad_reduce_in_fp32": True, **dict(run.ddp)})
    config = TransformerConfig(num_layers=1, hidden_size=8, num_attention_heads=1, qk_clip=run.qk_clip)
    module = _model(dtype, run.reordered and dist.get_rank() % 2 == 1)
    if run.experts:
        for parameter in [*module.parameters()][-2:]:
            parameter.allreduce = False
    model = DistributedDataParallel(config, ddp, module)
    settings: dict[str, Any] = {
        "optimizer": "adam",
        "lr": 0.125,
        "clip_grad": 1.0,
        "weight_decay": 0.01,
        "params_dtype": dtype,
        "bf16": run.precision == "bf16",
        "fp16": run.precision == "fp16",
        "initial_loss_scale": 64.0,
        "min_loss_scale": 1.0,
        "hysteresis": 1,
        "overlap_param_gather": ddp.overlap_param_gather,
        **both,
        **dict(run.optimizer),
    }
    optimizer = get_megatron_optimizer(OptimizerConfig(**settings), [model])
    for parameters in optimizer.param_groups:
        parameters["weight_decay"] *= parameters["wd_mult"]  # as Megatron's scheduler does
    if run.foreign_adam:
        optimizer.optimizer.__class__ = ForeignAdam
    # Only the flag: the offloading itself needs CUDA streams.
    optimizer.config.optimizer_cpu_offload |= run.offloaded
    return model, optimizer


def train(group: dist.ProcessGroup, run: Run) -> dict[str, Any]:
    """Returns losses, grad-norms, parameters, optimizer state and the counts of the plugin."""
    start(group)
    from megatron.core import parallel_state
    from megatron.core.distributed import param_and_grad_buffer

    # Megatron's sum in fp32 is switched on for the whole process, and stays on for models that do not ask for it.
    param_and_grad_buffer.dist_reduce_scatter_func = dist.reduce_scatter_tensor
    data_group = parallel_state.get_data_parallel_group(with_context_parallel=True)
    if run.data is None:
        return _train(group, run)
    config = OverlapConfig.model_validate({"tensor": {"method": run.tensor}, "data": dict(run.data)})
    with enable(config, strict=run.strict) as session:
        if run.late:
            for channel in ("data", "data sums"):
                session.transports.insert(data_group, LateTransport(data_group), channel)
        made = _train(group, run)
        sites, left = session.report().sites, session.report().not_overlapped
    made["overlapped"], made["left"] = {}, dict(left)
    for site, tally in sites.items():
        made["overlapped"][site.op] = made["overlapped"].get(site.op, 0) + tally.overlapped
    made["bytes"] = sum(tally.moved_bytes for tally in sites.values())
    made["reasons"] = sorted({reason for tally in sites.values() for reason in tally.fallbacks})
    return made


def _train(group: dist.ProcessGroup, run: Run) -> dict[str, Any]:
    model, optimizer = _wrapped(run)
    timer = _Timer()
    optimizer.config.timers, optimizer.config.barrier_with_L1_time = lambda *_, **__: timer, True
    hooks = run.sharded and model.ddp_config.overlap_param_gather
    if hooks:
        # As Megatron's training loop does until the first step has been made.
        model.disable_forward_pre_hook(param_sync=False)
    losses, norms, looked, under_way = [], [], [], []
    hooked = False
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message="The next bucket's parameter all-gather")
        for iteration in range(run.iterations):
            model.zero_grad_buffer()
            optimizer.zero_grad()
            for part in range(2):
                with model.no_sync() if part == 0 else nullcontext():
                    losses.append(_backward(model, optimizer, group.rank(), iteration, part, iteration in run.overflow))
            model.finish_grad_sync()
            done, norm, _ = optimizer.step()
            if run.qk_clip:
                for layer in model.module.layers:
                    layer.weight.data.mul_(0.5)
            norms.append(norm)
            assert done == (iteration not in run.overflow)
            under_way.append([one.param_gather_handle is not None for one in model.bucket_groups])
            if hooks and done and not hooked:
                model.enable_forward_pre_hook()
                hooked = True
            if iteration in run.evaluate:
                model.disable_forward_pre_hook()
                looked.append([parameter.detach().clone() for parameter in model.parameters()])
                model.enable_forward_pre_hook()
    if hooked:
        model.disable_forward_pre_hook()
    inner = (
        optimizer.chained_optimizers[0].optimizer if hasattr(optimizer, "chained_optimizers") else optimizer.optimizer
    )
    state = [inner.state[p] for one in inner.param_groups for p in one["params"]]
    return {
        "losses": losses,
        "norms": norms,
        "looked": looked,
        "under_way": under_way,
        "parameters": [parameter.detach().clone() for parameter in model.parameters()],
        "state": [{name: value.clone() for name, value in sorted(one.items())} for one in state],
        "steps": [one.get("step") for one in inner.param_groups],
        "scale": float(optimizer.get_loss_scale()),
        "barriers": timer.barriers,
    }


def _backward(model: Any, optimizer: Any, rank: int, iteration: int, part: int, overflow: bool) -> float:
    generator = torch.Generator().manual_seed(100 * iteration + 10 * part + rank)
    factors = torch.randint(-3, 4, (max(SIZES),), generator=generator).float()
    loss = model(factors)
    if overflow and part == 1 and rank == dist.get_world_size() - 1:
        loss = loss * torch.tensor(float("inf"))
    optimizer.scale_loss(loss).backward()
    return float(loss)


def compared(group: dist.ProcessGroup, run: Run, stock: Run) -> dict[str, Any]:
    """Runs both trainings and compares all results; returns the counts of the plugin."""
    mine, theirs = train(group, run), train(group, stock)
    for key in ("losses", "norms", "steps"):
        assert _same(mine[key], theirs[key]), f"{key}: {mine[key]} {theirs[key]}"
    assert mine["scale"] == theirs["scale"]
    # Pipeline stages have different numbers of buckets, but must meet in every barrier.
    assert mine["barriers"] == theirs["barriers"] > 0
    for key in ("parameters", "state", "looked"):
        assert len(mine[key]) == len(theirs[key])
        for index, (one, other) in enumerate(zip(mine[key], theirs[key], strict=True)):
            assert _same(one, other), f"{key} {index}: {one} {other}"
    return {key: mine[key] for key in ("overlapped", "left", "bytes", "reasons", "under_way", "scale")}


def _same(one: Any, other: Any) -> bool:
    if isinstance(one, torch.Tensor):
        return torch.equal(one, other)
    if isinstance(one, list):
        return len(one) == len(other) and all(_same(a, b) for a, b in zip(one, other, strict=True))
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(_same(one[key], other[key]) for key in one)
    return bool(one == other or (one != one and other != other))


def order_of_steps(group: dist.ProcessGroup) -> list[list[int]]:
    """The layers of each bucket, in the order in which the optimizer steps the buckets."""
    start(group)
    from megatron_overlap.adapters.data_parallel.optimizer_step import _in_forward_order

    model, optimizer = _wrapped(Run())
    layer_of = {
        id(parameter): number for number, layer in enumerate(model.module.layers) for parameter in layer.parameters()
    }
    inner = optimizer.chained_optimizers[0] if hasattr(optimizer, "chained_optimizers") else optimizer
    return [sorted({layer_of[id(parameter)] for parameter in one.params}) for one in _in_forward_order(inner)]


def are_gathered(group: dist.ProcessGroup, *, counts_steps: bool) -> bool:
    """Whether all parameters are complete after the optimizer step, in a loop that is not Megatron's."""
    start(group)
    from megatron.core import parallel_state

    config = OverlapConfig.model_validate({"tensor": {"method": "none"}, "data": {"method": "p2p"}})
    with enable(config) as session:
        data_group = parallel_state.get_data_parallel_group(with_context_parallel=True)
        for channel in ("data", "data sums"):
            session.transports.insert(data_group, LateTransport(data_group), channel)
        model, optimizer = _wrapped(Run())
        model.disable_forward_pre_hook(param_sync=False)
        if counts_steps:
            session.next_step()
        model.zero_grad_buffer()
        _backward(model, optimizer, group.rank(), 0, 0, False)
        model.finish_grad_sync()
        optimizer.step()
        complete = all(bool(parameter.isfinite().all()) for parameter in model.parameters())
        model.start_param_sync(force_sync=True)
    return complete


def error_of(group: dist.ProcessGroup, run: Run) -> str:
    """The error that ends a training with the plugin."""
    call: Callable[..., Any] = train
    try:
        call(group, run)
    except ValueError as error:
        return f"{type(error).__name__}: {error}"
    return "no error"


def saved_gradients(group: dist.ProcessGroup) -> list[str]:
    """`force_all_reduce`: every rank has all sums. Returns the counted reasons."""
    start(group)
    config = OverlapConfig.model_validate({"tensor": {"method": "none"}, "data": {"method": "auto"}})
    with enable(config) as session:
        model, optimizer = _wrapped(Run())
        model.zero_grad_buffer()
        _backward(model, optimizer, group.rank(), 0, 0, False)
        model.finish_grad_sync(force_all_reduce=True)
        sums = torch.cat([buffer.grad_data for buffer in model.buffers])
        sites = session.report().sites
    everyone = [torch.empty_like(sums) for _ in range(group.size())]
    dist.all_gather(everyone, sums, group=group)
    assert all(torch.equal(one, sums) for one in everyone)
    assert {site.op for site, tally in sites.items() if tally.overlapped} <= {"all_gather"}
    return sorted({reason for tally in sites.values() for reason in tally.fallbacks})


def names_are_untouched(group: dist.ProcessGroup) -> bool:
    """The global names of Megatron's module are unchanged during a session, and its methods after it."""
    start(group)
    from megatron.core.distributed import param_and_grad_buffer as module

    kind = module._ParamAndGradBucketGroup
    methods = ("start_grad_sync", "start_param_sync", "finish_param_sync")
    names = ("dist_all_gather_func", "dist_reduce_scatter_func", "_coalescing_manager", "torch")
    before = [getattr(kind, name) for name in methods]
    held = [getattr(module, name) for name in names]
    config = OverlapConfig.model_validate({"tensor": {"method": "none"}, "data": {"method": "p2p"}})
    with enable(config):
        meanwhile = [getattr(kind, name) for name in methods]
        _train(group, Run(iterations=2))
        kept = all(getattr(module, name) is own for name, own in zip(names, held, strict=True))
    after = [getattr(kind, name) for name in methods]
    return kept and after == before and not set(before) & set(meanwhile)
