"""Shapes that are measured, and the figures that are made of times. No device needed."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Shape:
    """One layer on one rank of `ranks`: `m` gathered rows; `n` and `k` of the local GEMM."""

    name: str
    op: str
    m: int
    n: int
    k: int
    ranks: int = 8

    @property
    def flops(self) -> int:
        return 2 * self.m * self.n * self.k

    @property
    def link_bytes(self) -> int:
        """Bytes in bf16 that this rank receives: others' rows of the input, or others' sums of its rows."""
        width = self.k if self.op == "ag" else self.n
        return (self.ranks - 1) * (self.m // self.ranks) * width * 2


MODELS = {"70b": (8192, 28672), "8b": (4096, 14336)}
"""LLaMA-3: hidden size and size of the feed-forward layer. Keys and values have 8 heads of 128 in both."""


def llama_layers(model: str, m: int, ranks: int = 8) -> list[Shape]:
    """The linear layers of a LLaMA-3 model over `ranks`, largest first.

    Raises:
        ValueError: rows or features do not divide by the number of ranks.
    """
    hidden, ffn = MODELS[model]
    for name, extent in {"rows": m, "features": hidden, "features of the feed-forward layer": ffn}.items():
        if extent % ranks:
            raise ValueError(f"{extent} {name} are not divisible by {ranks} ranks")
    return [
        Shape(f"llama{model} fc1 m{m}", "ag", m, 2 * ffn // ranks, hidden, ranks),
        Shape(f"llama{model} fc2 m{m}", "rs", m, hidden, ffn // ranks, ranks),
        Shape(f"llama{model} qkv m{m}", "ag", m, (hidden + 2048) // ranks, hidden, ranks),
        Shape(f"llama{model} proj m{m}", "rs", m, hidden, hidden // ranks, ranks),
    ]


def shapes(dry: bool = False) -> list[Shape]:
    """Layers of LLaMA-3 70B and 8B with tensor parallelism of 8, and Flux's shapes (49152 x 12288 over 8 ranks).

    Largest first, so that a run that is cut short has them.
    """
    if dry:
        return [Shape("dry", "ag", 64, 48, 40, 4), Shape("dry", "rs", 64, 40, 48, 4)]
    found = [shape for m in (8192, 4096) for model in MODELS for shape in llama_layers(model, m)]
    for m in (4096, 8192, 1024, 2048):
        found.append(Shape(f"flux m{m}", "ag", m, 49152 // 8, 12288))
        found.append(Shape(f"flux m{m}", "rs", m, 12288, 49152 // 8))
    return found


def overlap_figures(gemm_ms: float, comm_ms: float, fused_ms: float) -> dict[str, float]:
    """Flux's effective communication time and overlap efficiency, and eta; see docs/fused_kernels.md.

    `gemm_ms` is cuBLAS on resident data, `comm_ms` the same copies alone, `fused_ms` both in one.
    """
    ect = fused_ms - gemm_ms
    return {
        "ect_ms": ect,
        "overlap_efficiency": 1 - ect / comm_ms,
        "eta": (comm_ms + gemm_ms - fused_ms) / min(comm_ms, gemm_ms),
        "over_serial": fused_ms / (gemm_ms + comm_ms),
    }
