"""What the overlapped operations share: callback types, checks of the operands, and a GEMM into a given output."""

from collections.abc import Callable
from typing import NamedTuple

import torch
import torch.distributed as dist

from megatron_overlap.comm import Transport, transport_of

Observer = Callable[[str, int], None]
"""Called for each pass with its direction (`forward`, `skipped forward`, `dgrad`, `wgrad`) and the bytes that this rank
sent."""

WeightDone = Callable[[], torch.Tensor | None]
"""Called when `main_grad` holds the weight gradient. Autograd gets the result as the gradient."""


def unobserved(direction: str, num_bytes: int) -> None:
    """The observer of calls without one."""


class Projection(NamedTuple):
    """A weight `[F, K]` and the destination of its gradient.

    Attributes:
        main_grad: buffer to which the gradient is added, as Megatron's gradient accumulation fusion does; None returns
            the gradient to autograd.
        done: called in backward after the gradient is added to `main_grad`; autograd gets its return value.
    """

    weight: torch.Tensor
    main_grad: torch.Tensor | None = None
    done: WeightDone | None = None


def transport_for(group: dist.ProcessGroup | Transport) -> Transport:
    """The transport of `group`, or `group` if it is one."""
    return transport_of(group) if isinstance(group, dist.ProcessGroup) else group


def repeated[Derived](
    transport: Transport, of: tuple[object, ...], build: Callable[[], Derived], name: str = ""
) -> Derived:
    """What `build` returned for the same objects `of` in an earlier call with the present buffers of the transport.

    With a name, only for the objects of the last call with this name.
    """
    derived, ids = transport.buffer_pool.derived, tuple(map(id, of))
    found = derived.get(name or ids)
    if found is None or (name and tuple(map(id, found[0])) != ids):
        found = derived[name or ids] = of, build()  # `of` must live as long as its identity is compared
    return found[1]


def check_operands(
    x: torch.Tensor, w: torch.Tensor, bias: torch.Tensor | None, main_grad: torch.Tensor | None, name: str
) -> None:
    """Checks shapes, dtypes and devices.

    Raises:
        ValueError: an operand does not fit the weight.
    """
    if x.dim() < 2 or w.dim() != 2 or x.shape[-1] != w.shape[1]:
        raise ValueError(f"{name}: shape {tuple(x.shape)} does not fit a weight of shape {tuple(w.shape)}")
    if x.dtype != w.dtype or x.device != w.device:
        raise ValueError(f"{name}: {x.dtype} on {x.device} does not fit a weight of {w.dtype} on {w.device}")
    if bias is not None and bias.shape != w.shape[:1]:
        raise ValueError(f"bias: shape {tuple(bias.shape)}: must be ({w.shape[0]},)")
    if main_grad is not None and main_grad.shape != w.shape:
        raise ValueError(f"main_grad: shape {tuple(main_grad.shape)}: must be {tuple(w.shape)}")


def gathered_rows(x: torch.Tensor, ranks: int) -> int:
    """Rows of all ranks, where each rank has as many rows as `x`."""
    return int(x.shape[:-1].numel()) * ranks


def product(
    a: torch.Tensor, b: torch.Tensor, bias: torch.Tensor | None = None, out: torch.Tensor | None = None
) -> torch.Tensor:
    """`a @ b + bias`, in `out` if given."""
    return torch.mm(a, b, out=out) if bias is None else torch.addmm(bias, a, b, out=out)
