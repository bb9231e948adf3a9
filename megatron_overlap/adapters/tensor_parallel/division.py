"""How the input of layers is divided into two parts: the sequences of a micro-batch, or each sequence."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, Literal

import torch
import torch.distributed as dist
from megatron.core.tensor_parallel import checkpoint
from megatron.core.transformer.dot_product_attention import DotProductAttention
from megatron.core.transformer.enums import AttnMaskType

from megatron_overlap.adapters.tensor_parallel.eligibility import BATCH_DIMENSION, linears_of
from megatron_overlap.adapters.wrapping import replaced
from megatron_overlap.ops.tensor_parallel.batch_overlap import join_rows, split_rows
from megatron_overlap.schedules.heuristics import balanced_rows


class BatchDivision:
    """Each part has half of the sequences."""

    def parts(self, x: torch.Tensor) -> Sequence[torch.Tensor]:
        """Both parts of the input of the first layer."""
        return [part.contiguous() for part in x.chunk(2, dim=1)]

    def rows(self, x: torch.Tensor) -> Sequence[torch.Tensor]:
        """Both parts of a tensor that has the rows of all ranks. No communication."""
        return self.parts(x)

    def whole(self, parts: Sequence[torch.Tensor]) -> torch.Tensor:
        """The output of the last layer from that of its parts."""
        return torch.cat(list(parts), dim=1)

    def arguments(self, arguments: dict[str, Any], number: int) -> dict[str, Any]:
        """The arguments of the attention, besides the input, for one part."""
        part = {}
        for name, dim in BATCH_DIMENSION.items():
            value = arguments.get(name)
            if value is not None and dim is not None and value.shape[dim] > 1:
                value = value.chunk(2, dim=dim)[number]
            part[name] = value
        return part


class SequenceDivision:
    """The first part has the first rows of every sequence, `num_first` of each rank; the second part has the rest."""

    def __init__(self, group: dist.ProcessGroup, num_first: int) -> None:
        self._group, self._num_first = group, num_first

    def parts(self, x: torch.Tensor) -> Sequence[torch.Tensor]:
        return split_rows(x, self._group, self._num_first)

    def rows(self, x: torch.Tensor) -> Sequence[torch.Tensor]:
        return [self._rows(x, number) for number in range(2)]

    def whole(self, parts: Sequence[torch.Tensor]) -> torch.Tensor:
        first, second = parts
        return join_rows(first, second, self._group)

    def arguments(self, arguments: dict[str, Any], number: int) -> dict[str, Any]:
        """See `BatchDivision`. The second part attends to the keys of both parts."""
        part: dict[str, Any] = {"attention_mask": None}
        mask, angles = arguments.get("attention_mask"), arguments.get("rotary_pos_emb")
        if mask is not None:
            queries = self._rows(mask, number, dim=2)
            part["attention_mask"] = queries if number else self._rows(queries, number, dim=3)
        if isinstance(angles, tuple):
            part["rotary_pos_emb"] = tuple(self._rows(each, number) for each in angles)
        elif angles is not None:
            part["rotary_pos_emb"] = self._rows(angles, number)
        return part

    def _rows(self, tensor: torch.Tensor, number: int, dim: int = 0) -> torch.Tensor:
        """The rows of all ranks of one part."""
        num_first = self._num_first * self._group.size()
        start, stop = (num_first, tensor.shape[dim]) if number else (0, num_first)
        return tensor.narrow(dim, start, stop - start)


Division = BatchDivision | SequenceDivision
"""Divides the input and the arguments of layers into two parts, and joins their outputs."""


def sequence_division(layer: Any, x: torch.Tensor, split_at: float | Literal["auto"]) -> SequenceDivision:
    """The division for `layer` and later ones; `x` `[S/R, B, H]`: own rows. `TensorOverlap` describes `split_at`."""
    group, num_rows = layer.self_attention.linear_proj.tp_group, x.shape[0]
    if split_at != "auto":
        return SequenceDivision(group, min(max(round(split_at * num_rows), 1), num_rows - 1))
    shapes = tuple((linear.weight.shape[0], linear.weight.shape[1]) for linear in linears_of(layer))
    processors = torch.cuda.get_device_properties(x.device).multi_processor_count if x.is_cuda else None
    num_first = balanced_rows(num_rows, group.size(), x.shape[1], shapes, shapes[1][1], processors)
    return SequenceDivision(group, num_first)


class SplitCoreAttention:
    """The core attention of one layer on a split sequence: the second part reads the keys of both parts.

    With `--recompute-granularity selective` it is recomputed here. Megatron's `_checkpointed_attention_forward` would
    call the core attention in backward, where its forward is no longer replaced.
    """

    def __init__(self, attention: Any) -> None:
        self._attention, self._core = attention, attention.core_attention
        self._forward = self._core.forward
        self._recomputes = attention.checkpoint_core_attention and attention.training
        self._keys: tuple[torch.Tensor, ...] = ()

    @contextmanager
    def part(self, number: int) -> Iterator[None]:
        """Inside the context the core attention runs on one part. The first part runs first."""
        core, attention, forward = vars(self._core), vars(self._attention), partial(self._run_part, number)
        with replaced(attention, checkpoint_core_attention=False), replaced(core, forward=forward):
            yield

    def _run_part(
        self, number: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: Any, **kwargs: Any
    ) -> Any:
        forward, tensors = self._forward, (query, key, value, mask)
        if number == 0:
            self._keys = key, value
        else:
            forward, tensors = self._of_both_keys, (query, key, value, mask, *self._keys)
        run = partial(forward, **kwargs)
        return checkpoint(run, False, *tensors) if self._recomputes else run(*tensors)

    def _of_both_keys(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        mask: torch.Tensor | None,
        first_key: torch.Tensor,
        first_value: torch.Tensor,
        **kwargs: Any,
    ) -> torch.Tensor:
        rows, keys = query.shape[0], torch.cat((first_key, key))
        values = torch.cat((first_value, value))
        if not isinstance(self._core, DotProductAttention):
            # TransformerEngine aligns a causal mask at the first key.
            kwargs["attn_mask_type"] = AttnMaskType.causal_bottom_right
        elif mask is None:
            ones = torch.ones(1, 1, rows, keys.shape[0], dtype=torch.bool, device=query.device)
            mask = ones.triu(keys.shape[0] - rows + 1)
        output: torch.Tensor = self._forward(query, keys, values, mask, **kwargs)
        return output
