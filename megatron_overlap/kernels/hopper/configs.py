"""The kernels for Hopper as they ship, to be compiled ahead of time; see `kernels.configs`."""

from __future__ import annotations

from typing import Any

from megatron_overlap.kernels.configs import HOPPER, HOPPER_SMALL, SM90, Form, Variant
from megatron_overlap.kernels.hopper.operands import blocks_of
from megatron_overlap.kernels.launch import MAX_POLLS


def shipped_for_hopper() -> list[Variant]:
    """Every kernel in Gluon, both forms and types, with bias and without."""
    variants = []
    for dtype in ("bf16", "fp16"):
        for size in ("", " small"):
            for form in ("nt", "nn"):
                variants += [_variant("ag_gemm", form, dtype, size, has_bias) for has_bias in (False, True)]
                variants.append(_variant("gemm_rs", form, dtype, size, False))
    return variants


def _variant(kind: str, form: Form, dtype: str, size: str, has_bias: bool) -> Variant:
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
        pointers = {"landings_ptr": "*i64", "flags_ptr": "*i64", "counters_ptr": "*i32", "tiles_ptr": "*i32"}
        constants |= {"DTYPE": dtype}
    return Variant(
        f"{kind}_sm90 {form} {dtype}{size}{' bias' if has_bias else ''}",
        f"hopper.{kind}",
        kernel,
        SM90,
        config.num_warps,
        constants,
        pointers,
        aligned,
        descriptors={"a_desc": (dtype, of_a), "b_desc": (dtype, of_b)},
    )
