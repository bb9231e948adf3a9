"""Lists the kernel variants that training can launch, to compile them ahead of time."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any, Literal

from megatron_overlap.kernels.gemm_rs import ADD_WARPS, SUM_COLUMNS, SUM_ROWS, SUM_WARPS, add_elements
from megatron_overlap.kernels.launch import (
    ALIGNED,
    ALIGNED_SMALL,
    ARCHITECTURES,
    HOPPER,
    HOPPER_SMALL,
    MAX_POLLS,
    ODD,
    SM90,
    GemmConfig,
    blocks_of,
)

Form = Literal["nt", "nn"]
"""`nt`: B is a transposed weight (forward). `nn`: B is a weight (dgrad)."""


@dataclass(frozen=True, slots=True)
class Variant:
    """Everything that Triton needs to compile one kernel without a device.

    Attributes:
        name: name in the table of scripts/fused_table.py.
        module: module of `megatron_overlap.kernels` that defines the kernel.
        kernel: name of the kernel function.
        arch: 80, 90 (sm_90a) or 100 (sm_100a).
        num_warps: warps of a block.
        constants: values of compile-time arguments.
        pointers: Triton type of each pointer argument.
        aligned: arguments that are multiples of 16.
        unit: strides that are 1.
        descriptors: for a Gluon kernel, the element type and tile shape of each TMA descriptor.
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


_FLAG_POINTERS = {"tiles_ptr": "*i32", "flags_ptr": "*i32", "status_ptr": "*i32"}


def shipped() -> list[Variant]:
    """Return a variant of every Triton kernel for every architecture, data type and alignment."""
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
        variants.append(_wait(arch))
        for dtype in ("bf16", "fp16"):
            variants += [_sum(arch, dtype, num_ranks, even) for num_ranks in (2, 4, 8) for even in (True, False)]
            for even in (True, False):
                variants += [_add(arch, dtype, num_terms, even) for num_terms in (1, 3, 7)]
                # Two sums: all terms but the last one, and the last one.
                variants += [_add(arch, dtype, num_terms, even, out="fp32") for num_terms in (2, 6)]
                variants.append(_add(arch, dtype, 1, even, own="fp32"))
                variants.append(_add(arch, dtype, 7, even, divisor=8))
    return variants


def _ragged(variant: Variant) -> Variant:
    """Return the variant whose last tiles are partial."""
    parts = {name: False for name in ("EVEN_N", "EVEN_K") if name in variant.constants}
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
        pointers | {"recv_buffers_ptr": "*i64", "flags_ptr": "*i64"},
        (*_wide_strides(form), "slot_offset") if aligned else (),
        _unit_strides(form),
    )


def _sum(arch: int, dtype: str, num_ranks: int, even: bool) -> Variant:
    values = dict.fromkeys(("recv_buffer_ptr", "out_ptr"), f"*{dtype}")
    return Variant(
        f"sum of {num_ranks} {dtype}{'' if even else ' odd'}",
        "gemm_rs",
        "sum_received_kernel",
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


def _add(
    arch: int, dtype: str, num_terms: int, even: bool, *, own: str = "", out: str = "", divisor: int = 1
) -> Variant:
    others = (f" to {own} rows" if own else "") + (f" in {out}" if out else "") + " mean" * (divisor > 1)
    return Variant(
        f"add {num_terms} {dtype}{others}{'' if even else ' odd'}",
        "gemm_rs",
        "add_terms_kernel",
        arch,
        ADD_WARPS,
        {"NUM_TERMS": num_terms, "DIVISOR": divisor, "BLOCK": add_elements(16 if even else 1)},
        {"terms_ptr": f"*{dtype}", "own_ptr": f"*{own or dtype}", "out_ptr": f"*{out or dtype}"},
        ("N",) if even else (),
    )


def _wait(arch: int) -> Variant:
    pointers = {key: _FLAG_POINTERS[key] for key in ("flags_ptr", "status_ptr")}
    return Variant("wait for all", "primitives", "wait_all_kernel", arch, 1, {"MAX_POLLS": MAX_POLLS}, pointers, ())


def shipped_for_hopper() -> list[Variant]:
    """Return a variant of every Gluon kernel: both forms and data types, with and without bias."""
    variants = []
    for dtype in ("bf16", "fp16"):
        for size in ("", " small"):
            for form in ("nt", "nn"):
                variants += [_hopper_variant("ag_gemm", form, dtype, size, has_bias) for has_bias in (False, True)]
                variants.append(_hopper_variant("gemm_rs", form, dtype, size, False))
    return variants


def _hopper_variant(kind: str, form: Form, dtype: str, size: str, has_bias: bool) -> Variant:
    config = HOPPER_SMALL if size else HOPPER
    constants: dict[str, Any] = {key: value for key, value in config.constants().items() if key != "num_warps"} | {
        "NT": form == "nt"
    }
    of_a, of_b = blocks_of(config, form)
    if kind == "ag_gemm":
        kernel, aligned = "ag_gemm_sm90_kernel", ("N", "K", "stride_om")
        pointers = {"bias_ptr": f"*{dtype}", "out_ptr": f"*{dtype}"}
        pointers |= dict.fromkeys(("tiles_ptr", "flags_ptr", "status_ptr"), "*i32")
        constants |= {"HAS_BIAS": has_bias, "MAX_POLLS": MAX_POLLS}
    else:
        kernel, aligned = "gemm_to_owners_sm90_kernel", ("N", "K", "slot_offset")
        pointers = {"recv_buffers_ptr": "*i64", "flags_ptr": "*i64", "counters_ptr": "*i32", "tiles_ptr": "*i32"}
        constants |= {"DTYPE": dtype}
    return Variant(
        f"{kind}_sm90 {form} {dtype}{size}{' bias' if has_bias else ''}",
        "hopper_gemm",
        kernel,
        SM90,
        config.num_warps,
        constants,
        pointers,
        aligned,
        descriptors={"a_desc": (dtype, of_a), "b_desc": (dtype, of_b)},
    )
