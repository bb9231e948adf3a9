"""The kernels as they ship: which tile shapes exist, for which operands and architectures. Needs no torch tensor.

What is aligned (columns and depth are multiples of 16, so that rows start at multiples of 16 bytes) takes the wide
tiles, also where the last tile is not whole (`ragged`). What is not loads two bytes at a time under masks and keeps
smaller tiles, so that nothing spills.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any, Literal

from megatron_overlap.kernels.launch import MAX_POLLS, GemmConfig

Form = Literal["nt", "nn"]
"""`nt`: B is a transposed weight (forward), `nn`: a weight (dgrad)."""

ALIGNMENT = 16
"""Triton compiles code of its own for integers that are multiples of this."""

SM80, SM90, SM100 = 80, 90, 100
ARCHITECTURES = (SM80, SM90, SM100)
ALIGNED = {
    SM80: GemmConfig(128, 128, 32, 8, 4, 4),
    SM90: GemmConfig(128, 256, 64, 8, 3, 8),
    SM100: GemmConfig(128, 256, 64, 8, 3, 8),
}
# Half the columns: fewer tiles stand idle in the last wave when there are few rows.
ALIGNED_SMALL = {
    SM80: GemmConfig(64, 128, 32, 8, 4, 4),
    SM90: GemmConfig(128, 128, 64, 8, 4, 8),
    SM100: GemmConfig(128, 128, 64, 8, 4, 8),
}
# The kernels in Gluon: rings of four and six slots fill the shared memory that a block may have.
HOPPER = GemmConfig(128, 256, 64, 8, 4, 8)
HOPPER_SMALL = GemmConfig(128, 128, 64, 8, 6, 8)
HOPPER_TILES = tuple((config.block_m, config.block_n, config.block_k) for config in (HOPPER, HOPPER_SMALL))
ODD = dict.fromkeys(ARCHITECTURES, GemmConfig(64, 64, 32, 8, 3, 4)) | {SM100: GemmConfig(64, 64, 32, 8, 3, 8)}
# Twice the accumulator is live where it is added to what was there: wider tiles spill.
WGRAD = {
    SM80: GemmConfig(128, 128, 32, 8, 3, 8),
    SM90: GemmConfig(128, 128, 64, 8, 4, 8),
    SM100: GemmConfig(128, 128, 64, 8, 4, 8),
}
WGRAD_ODD = dict.fromkeys(ARCHITECTURES, GemmConfig(64, 32, 32, 8, 3, 4)) | {SM100: GemmConfig(64, 32, 16, 8, 3, 4)}


def newest(capability: int) -> int:
    """The newest architecture known that a device of `capability` runs code for.

    Raises:
        ValueError: the device is older than sm_80.
    """
    known = [arch for arch in ARCHITECTURES if arch <= capability]
    if not known:
        raise ValueError(f"capability: sm_{capability}: fused kernels need sm_80 or newer; use method p2p")
    return known[-1]


def config_for(capability: int, *, aligned: bool, num_tiles: int, num_programs: int, other: bool = False) -> GemmConfig:
    """The tile shape for a GEMM; `num_tiles` is counted in tiles of `ALIGNED`.

    Args:
        capability: 10 times the compute capability; a newer one than is known takes the newest known.
        aligned: columns and depth are multiples of `ALIGNMENT`.
        num_tiles: tiles of the whole GEMM.
        num_programs: blocks of the persistent grid.
        other: take the other one of the two aligned shapes than by this rule.

    Raises:
        ValueError: the device is older than sm_80.
    """
    arch = newest(capability)
    if not aligned:
        return ODD[arch]
    wide = num_tiles >= 2 * num_programs
    return (ALIGNED if wide != other else ALIGNED_SMALL)[arch]


@dataclass(frozen=True, slots=True)
class Variant:
    """One kernel to be compiled: enough to do so without a device.

    Attributes:
        name: how people call it.
        module: file of `megatron_overlap.kernels`.
        kernel: the function in it.
        arch: 80, 90 (sm_90a) or 100 (sm_100a).
        num_warps: of a block.
        constants: values of compile-time arguments.
        pointers: Triton type of each pointer argument.
        aligned: arguments that are multiples of 16.
        unit: strides that are 1.
        descriptors: of a kernel in Gluon: type of element and shape of the tiles that TMA loads by each descriptor.
    """

    name: str
    module: str
    kernel: str
    arch: int
    num_warps: int
    constants: dict[str, Any]
    pointers: dict[str, str]
    aligned: tuple[str, ...]
    unit: tuple[str, ...] = ()
    descriptors: dict[str, tuple[str, tuple[int, int]]] = field(default_factory=dict)


_FLAG_POINTERS = {"tiles_ptr": "*i32", "chunks_ptr": "*i32", "flags_ptr": "*i32", "status_ptr": "*i32"}


def shipped() -> list[Variant]:
    """Every kernel a user may run, for every architecture."""
    variants: list[Variant] = []
    for arch in ARCHITECTURES:
        for dtype in ("bf16", "fp16"):
            for size, table in (("", ALIGNED), (" small", ALIGNED_SMALL), (" odd", ODD)):
                config = table[arch]
                for form in ("nt", "nn"):
                    for ragged in ("",) if table is ODD else ("", " ragged"):
                        name = f"{form} {dtype}{size}{ragged}"
                        for make in (_gather, _scatter):
                            variant = make(name, arch, form, dtype, config, aligned=table is not ODD)
                            variants.append(_ragged(variant) if ragged else variant)
            for size, table in (("", WGRAD), (" odd", WGRAD_ODD)):
                for total in ("fp32", dtype):
                    name = f"{dtype} to {total}{size}"
                    variant = _wgrad(name, arch, dtype, total, table[arch], aligned=table is WGRAD)
                    variants.append(variant)
                    if table is WGRAD:
                        variants.append(_ragged(replace(variant, name=f"{variant.name} ragged")))
        variants.append(_wait(arch))
        for dtype in ("bf16", "fp16"):
            variants += [_sum(arch, dtype, num_ranks, even) for num_ranks in (2, 4, 8) for even in (True, False)]
    return variants


def _ragged(variant: Variant) -> Variant:
    """The same where the last tiles are not whole."""
    parts = {name: False for name in ("EVEN_N", "EVEN_K", "EVEN_F") if name in variant.constants}
    return replace(variant, constants=variant.constants | parts)


def _gemm_constants(config: GemmConfig, aligned: bool) -> dict[str, Any]:
    constants: dict[str, Any] = {key: value for key, value in config.constants().items() if key != "num_warps"}
    return constants | {"EVEN_N": aligned, "EVEN_K": aligned, "WIDEN": False}


def _unit_strides(form: str) -> tuple[str, ...]:
    return ("stride_ak", "stride_bk" if form == "nt" else "stride_bn")


def _wide_strides(form: str) -> tuple[str, ...]:
    return ("N", "K", "stride_am", "stride_bn" if form == "nt" else "stride_bk")


def _gather(name: str, arch: int, form: str, dtype: str, config: GemmConfig, *, aligned: bool) -> Variant:
    values = dict.fromkeys(("a_ptr", "b_ptr", "bias_ptr", "out_ptr"), f"*{dtype}")
    return Variant(
        f"ag_gemm {name}",
        "ag_gemm",
        "ag_gemm_kernel",
        arch,
        config.num_warps,
        _gemm_constants(config, aligned) | {"HAS_BIAS": not aligned, "MAX_POLLS": MAX_POLLS},
        values | {key: _FLAG_POINTERS[key] for key in ("tiles_ptr", "flags_ptr", "status_ptr")},
        (*_wide_strides(form), "stride_om") if aligned else (),
        _unit_strides(form),
    )


def _scatter(name: str, arch: int, form: str, dtype: str, config: GemmConfig, *, aligned: bool) -> Variant:
    pointers = dict.fromkeys(("a_ptr", "b_ptr"), f"*{dtype}") | {"tiles_ptr": "*i32", "counters_ptr": "*i32"}
    return Variant(
        f"gemm_rs {name}",
        "gemm_rs",
        "gemm_to_owners_kernel",
        arch,
        config.num_warps,
        _gemm_constants(config, aligned) | {"DTYPE": dtype},
        pointers | {"landings_ptr": "*i64", "flags_ptr": "*i64"},
        (*_wide_strides(form), "slot_offset") if aligned else (),
        _unit_strides(form),
    )


def _sum(arch: int, dtype: str, num_ranks: int, even: bool) -> Variant:
    from megatron_overlap.kernels.gemm_rs import SUM_COLUMNS, SUM_ROWS, SUM_WARPS

    values = dict.fromkeys(("landing_ptr", "out_ptr"), f"*{dtype}")
    return Variant(
        f"sum of {num_ranks} {dtype}{'' if even else ' odd'}",
        "gemm_rs",
        "sum_landed_kernel",
        arch,
        SUM_WARPS,
        {
            "NUM_RANKS": num_ranks,
            "BLOCK_M": SUM_ROWS,
            "BLOCK_N": SUM_COLUMNS,
            "EVEN_N": even,
            "MAX_POLLS": MAX_POLLS,
        },
        values | {key: _FLAG_POINTERS[key] for key in ("tiles_ptr", "flags_ptr", "status_ptr")},
        ("slot_stride", "N") if even else (),
    )


def _wait(arch: int) -> Variant:
    pointers = {key: _FLAG_POINTERS[key] for key in ("flags_ptr", "status_ptr")}
    return Variant("wait for all", "wait", "wait_all_kernel", arch, 1, {"MAX_POLLS": MAX_POLLS}, pointers, ())


def _wgrad(name: str, arch: int, dtype: str, total: str, config: GemmConfig, *, aligned: bool) -> Variant:
    values = {"dy_ptr": f"*{dtype}", "x_ptr": f"*{dtype}", "out_ptr": f"*{total}"}
    constants = _gemm_constants(config, aligned)
    del constants["EVEN_N"]
    return Variant(
        f"wgrad {name}",
        "wgrad",
        "wgrad_kernel",
        arch,
        config.num_warps,
        constants | {"EVEN_F": aligned, "ADD": total == "fp32", "MAX_POLLS": MAX_POLLS},
        values | {key: _FLAG_POINTERS[key] for key in ("chunks_ptr", "flags_ptr", "status_ptr")},
        ("F", "K", "stride_dm", "stride_xm", "stride_om") if aligned else (),
    )
