"""How the input of layers is divided into two parts: the sequences of a micro-batch, or each sequence."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Protocol

import torch
import torch.distributed as dist
from megatron.core.transformer.dot_product_attention import DotProductAttention
from megatron.core.transformer.enums import AttnMaskType

from megatron_overlap.adapters.tensor_parallel.eligibility import BATCH_DIMENSION
from megatron_overlap.adapters.wrapping import Method, replaced_forward
from megatron_overlap.ops.tensor_parallel.sequence_split import join_rows, split_rows


class Division(Protocol):
    """Divides the input and the arguments of layers into two parts, and joins their outputs."""

    def parts(self, x: torch.Tensor) -> Sequence[torch.Tensor]:
        """Both parts of the input of the first layer."""

    def whole(self, parts: Sequence[torch.Tensor]) -> torch.Tensor:
        """The output of the last layer."""

    def arguments(self, arguments: dict[str, Any], number: int) -> dict[str, Any]:
        """The arguments of the attention, besides the input, for one part."""


class BatchDivision:
    """Each part has half of the sequences."""

    def parts(self, x: torch.Tensor) -> Sequence[torch.Tensor]:
        """See `Division`."""
        return [part.contiguous() for part in x.chunk(2, dim=1)]

    def whole(self, parts: Sequence[torch.Tensor]) -> torch.Tensor:
        """See `Division`."""
        return torch.cat(list(parts), dim=1)

    def arguments(self, arguments: dict[str, Any], number: int) -> dict[str, Any]:
        """See `Division`."""
        part = {}
        for name, dim in BATCH_DIMENSION.items():
            value = arguments.get(name)
            if value is not None and dim is not None and value.shape[dim] > 1:
                value = value.chunk(2, dim=dim)[number]
            part[name] = value
        return part


class SequenceDivision:
    """The first part has the first half of every sequence, the second part the rest.

    Args:
        group: the tensor-parallel ranks, each with a share of both parts.
    """

    def __init__(self, group: dist.ProcessGroup) -> None:
        self._group = group

    def parts(self, x: torch.Tensor) -> Sequence[torch.Tensor]:
        """See `Division`: own rows of both parts."""
        return split_rows(x, self._group)

    def whole(self, parts: Sequence[torch.Tensor]) -> torch.Tensor:
        """See `Division`: own rows of the sequence."""
        first, second = parts
        return join_rows(first, second, self._group)

    def arguments(self, arguments: dict[str, Any], number: int) -> dict[str, Any]:
        """See `Division`. The second part attends to the keys of both parts."""
        part: dict[str, Any] = {}
        mask, angles = arguments.get("attention_mask"), arguments.get("rotary_pos_emb")
        if mask is not None:
            queries = mask.chunk(2, dim=2)[number]
            part["attention_mask"] = queries if number else queries.chunk(2, dim=3)[0]
        else:
            part["attention_mask"] = None
        if isinstance(angles, tuple):
            part["rotary_pos_emb"] = tuple(each.chunk(2, dim=0)[number] for each in angles)
        elif angles is not None:
            part["rotary_pos_emb"] = angles.chunk(2, dim=0)[number]
        return part


class SplitCoreAttention:
    """The core attention of one layer on a split sequence: the second part reads the keys of both parts."""

    def __init__(self, core: Any) -> None:
        self._core, self._forward = core, core.forward
        self._keys: tuple[torch.Tensor, torch.Tensor] | None = None

    @contextmanager
    def part(self, number: int) -> Iterator[None]:
        """Inside the context the core attention runs on one part. The first part runs first."""
        forward: Method = self._second if number else self._first
        with replaced_forward(self._core, forward):
            yield

    def _first(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: torch.Tensor | None, **kwargs: Any
    ) -> torch.Tensor:
        self._keys = key, value
        output: torch.Tensor = self._forward(query, key, value, mask, **kwargs)
        return output

    def _second(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: torch.Tensor | None, **kwargs: Any
    ) -> torch.Tensor:
        assert self._keys is not None
        rows, keys = query.shape[0], torch.cat((self._keys[0], key))
        values = torch.cat((self._keys[1], value))
        if not isinstance(self._core, DotProductAttention):
            # TransformerEngine aligns a causal mask at the first key.
            kwargs["attn_mask_type"] = AttnMaskType.causal_bottom_right
        elif mask is None:
            ones = torch.ones(1, 1, rows, keys.shape[0], dtype=torch.bool, device=query.device)
            mask = ones.triu(keys.shape[0] - rows + 1)
        output: torch.Tensor = self._forward(query, keys, values, mask, **kwargs)
        return output
