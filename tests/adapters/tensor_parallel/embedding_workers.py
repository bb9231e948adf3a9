"""Runs a model of Megatron on the stock path and with batch overlap of its embedding."""

from __future__ import annotations

import weakref
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
import torch.nn.functional as F

from megatron_overlap import OverlapConfig, enable
from tests.adapters.tensor_parallel.batch_overlap_workers import HIDDEN, make_config, sum_over_rows
from tests.adapters.tensor_parallel.batch_overlap_workers import PREPARE as PREPARE_BLOCK
from tests.adapters.tensor_parallel.linear_workers import start

VOCABULARY = 64


def make_model(group: dist.ProcessGroup, dtype: torch.dtype, rows: int, *, position: str, **settings: Any) -> Any:
    """A LLaMA of two layers of the local spec, with the same weights on every call."""
    from megatron.core.models.gpt import GPTModel

    from scripts.pretrain_decoder import layer_specification

    llama = {"normalization": "RMSNorm", "gated_linear_unit": True, "activation_func": F.silu, "add_bias_linear": False}
    config = make_config(group, dtype, sequence_parallel=True, **llama, **settings)
    torch.manual_seed(13)
    layer = layer_specification(config, use_te=False)
    embedding: dict[str, Any] = {"position_embedding_type": position, "parallel_output": True}
    return GPTModel(config, layer, VOCABULARY, rows, **embedding).to(dtype)


def _step(model: Any, rows: int, batch: int, training: bool) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(17)
    tokens, labels = (torch.randint(VOCABULARY, (batch, rows), generator=generator) for _ in range(2))
    weights = torch.rand(batch, rows, generator=generator)
    positions = torch.arange(rows).expand(batch, rows)
    with torch.set_grad_enabled(training):
        loss = model(tokens, positions, None, labels=labels)
    if not training:
        return {"loss": loss}
    (loss * weights).sum().backward()
    sum_over_rows(model)
    return {"loss": loss.detach(), **{name: parameter.grad for name, parameter in model.named_parameters()}}


def against_stock(
    group: dist.ProcessGroup,
    *,
    dtype: torch.dtype = torch.float32,
    batch: int = 2,
    own_rows: int = 4,
    prepare: str = "nothing",
    position: str = "rope",
    training: bool = True,
    steps: int = 1,
    tensor: dict[str, Any],
    reason: str = "",
    **settings: Any,
) -> tuple[int, int]:
    """Loss and all gradients equal stock, and the report has `reason` where the embedding is not overlapped.

    Returns:
        How often the embedding left its sum to the first layer, and how often the block completed that sum instead.
    """
    start(group)
    from megatron_overlap.adapters.tensor_parallel import batch_overlap

    counts = {"pending": 0, "whole": 0}

    class Counted(batch_overlap.PendingEmbedding):
        def __init__(self, *args: Any) -> None:
            super().__init__(*args)
            counts["pending"] += 1

        def whole(self) -> torch.Tensor:
            counts["whole"] += 1
            return super().whole()

    rows = own_rows * group.size()

    def run() -> dict[str, torch.Tensor]:
        model = make_model(group, dtype, rows, position=position, **settings).train(training)
        PREPARE[prepare](model)
        for _ in range(steps):
            model.zero_grad()
            result = _step(model, rows, batch, training)
        return result

    stock = run()
    config = OverlapConfig.model_validate({"tensor": tensor})
    with patch.object(batch_overlap, "PendingEmbedding", Counted), enable(config) as session:
        mine = run()
        report = session.report()
    sites = {site.direction: each for site, each in report.sites.items() if site.kind == "embedding"}
    summed = counts["pending"] - counts["whole"]
    sent = batch * own_rows * HIDDEN * torch.tensor([], dtype=dtype).itemsize * (group.size() - 1)
    for direction in ("forward", "dgrad") if training and summed else ("forward",) if summed else ():
        tally = sites.pop(direction)
        assert (tally.overlapped, tally.moved_bytes) == (2 * summed, sent * summed), direction
    assert not sites
    assert reason in report.not_overlapped.get("VocabParallelEmbedding", "")
    assert ("VocabParallelEmbedding" in report.not_overlapped) == (not summed)
    tolerance = 1e-5 if dtype == torch.float32 else 6e-2
    assert sorted(mine) == sorted(stock)
    for name, value in stock.items():
        scale = float(value.abs().max())
        torch.testing.assert_close(mine[name], value, rtol=0, atol=tolerance * scale, msg=lambda m, n=name: f"{n}: {m}")
    return counts["pending"], counts["whole"]


def order(group: dist.ProcessGroup, split: str) -> tuple[list[str], list[str]]:
    """The order of starts and waits of the first messages of forward and of the last ones of backward."""
    start(group)
    from megatron_overlap.comm.gloo import GlooTransport
    from tests.ops.tensor_parallel.part_messages_workers import Logged

    log: list[str] = []
    model = make_model(group, torch.float32, 4 * group.size(), position="rope")
    with enable(OverlapConfig.model_validate({"tensor": {"method": "p2p", "split": split}})) as session:
        tensor_group = model.decoder.layers[0].self_attention.linear_proj.tp_group
        for part in ("a", "b"):
            logged = Logged(GlooTransport(tensor_group), part, log)
            session.transports.insert(tensor_group, logged, f"part {part}")
        model.output_layer.register_forward_hook(lambda *_: log.append("output layer"))
        _step(model, 4 * group.size(), 2, True)
    end = log.index("output layer")
    return log[:8], log[end + 1 :][-9:]


def is_refused(group: dist.ProcessGroup) -> str:
    """The error where other code copies the output of the embedding before the first layer."""
    start(group)
    rows = 4 * group.size()
    model = make_model(group, torch.float32, rows, position="rope")

    def copies(*_: Any) -> None:
        def copy(_: Any, args: Any, kwargs: dict[str, Any]) -> Any:
            return args, {**kwargs, "hidden_states": kwargs["hidden_states"].clone()}

        model.decoder.register_forward_pre_hook(copy, with_kwargs=True)

    model.rotary_pos_emb.register_forward_hook(copies)
    with enable(OverlapConfig.model_validate({"tensor": {"method": "p2p", "split": "batch"}})):
        try:
            _step(model, rows, 2, True)
        except RuntimeError as error:
            return str(error)
    return ""


def runs_after_an_error(group: dist.ProcessGroup) -> bool:
    """Whether a layer runs by itself after an error between the embedding and the first layer."""
    start(group)
    rows = 4 * group.size()
    model = make_model(group, torch.float32, rows, position="rope")

    def fails(*_: Any) -> None:
        raise ValueError("between")

    model.rotary_pos_emb.register_forward_hook(fails)
    with enable(OverlapConfig.model_validate({"tensor": {"method": "p2p", "split": "batch"}})):
        try:
            _step(model, rows, 2, True)
        except ValueError:
            output, _ = model.decoder.layers[0](hidden_states=torch.ones(4, 2, HIDDEN), attention_mask=None)
            return bool(output.isfinite().all())
    return False


def is_freed(group: dist.ProcessGroup) -> bool:
    """Whether the terms of the embedding are freed before the layers run where none of them supports batch overlap."""
    start(group)
    from megatron_overlap.adapters.tensor_parallel import batch_overlap

    rows, alive = 4 * group.size(), []
    model = make_model(group, torch.float32, rows, position="rope")
    PREPARE["first unsupported"](model)

    class Watched(batch_overlap.PendingEmbedding):
        def __init__(self, *args: Any) -> None:
            super().__init__(*args)
            terms = weakref.ref(self.terms)
            model.decoder.layers[0].register_forward_pre_hook(lambda *_: alive.append(terms() is not None))

    config = OverlapConfig.model_validate({"tensor": {"method": "auto"}})
    with patch.object(batch_overlap, "PendingEmbedding", Watched), enable(config):
        _step(model, rows, 2, True)
    return alive == [False]


def _gathered_late(model: Any) -> None:
    """As Megatron's --overlap-param-gather: the weight is there when its hook has run, and NaN before."""
    words = model.embedding.word_embeddings
    weight = words.weight.detach().clone()
    words.weight.data.fill_(float("nan"))

    def wait(*_: Any) -> None:
        words.weight.data.copy_(weight)

    words.register_forward_pre_hook(wait)
    model.decoder.register_forward_pre_hook(lambda *_: None)


PREPARE: dict[str, Any] = {
    "nothing": lambda model: None,
    "late": _gathered_late,
    "hook": lambda model: model.embedding.register_forward_hook(lambda *_: None),
    "hook of the words": lambda model: model.embedding.word_embeddings.register_forward_hook(lambda *_: None),
    "hook of the block": lambda model: model.decoder.register_forward_pre_hook(lambda *_: None, with_kwargs=True),
    "backward hook": lambda model: model.decoder.layers[0].register_full_backward_hook(lambda *_: None),
    "first unsupported": lambda model: PREPARE_BLOCK["first unsupported"](model.decoder),
    "subclass": lambda model: setattr(model, "__class__", type("Other", (type(model),), {})),
}
