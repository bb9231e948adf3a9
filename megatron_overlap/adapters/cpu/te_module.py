"""Puts PyTorch kernels in place of TransformerEngine's native module on a machine without a GPU.

TransformerEngine (TE) is Python over a native module, `transformer_engine_torch`, whose kernels need a GPU. `install`
makes TE import a module with the kernels of `te_kernels` instead. Enumerations are those of TE 2.20.2;
`scripts/te_signatures.py` compares them and the kernels with the true module.
"""

import importlib.abc
import importlib.machinery
import importlib.metadata
import os
import sys
from types import ModuleType
from typing import Any

from megatron_overlap.adapters.cpu.te_kernels import KERNELS, DType, enumeration
from megatron_overlap.adapters.wrapping import replaced

NATIVE_MODULE = "transformer_engine_torch"
_CHANGED_MODULE = "transformer_engine.common"
_NVTE_ENUMS = {
    "NVTE_QKV_Layout": """SB3HD SBH3D SBHD_SB2HD SBHD_SBH2D SBHD_SBHD_SBHD BS3HD BSH3D BSHD_BS2HD BSHD_BSH2D
        BSHD_BSHD_BSHD T3HD TH3D THD_T2HD THD_TH2D THD_THD_THD SBHD_BSHD_BSHD BSHD_SBHD_SBHD THD_BSHD_BSHD THD_SBHD_SBHD
        Paged_KV_BSHD_BSHD_BSHD Paged_KV_BSHD_SBHD_SBHD Paged_KV_SBHD_BSHD_BSHD Paged_KV_SBHD_SBHD_SBHD
        Paged_KV_THD_BSHD_BSHD Paged_KV_THD_SBHD_SBHD BHSD_BHSD_BHSD QKV_Layout_NOT_SET""",
    "NVTE_QKV_Format": "SBHD BSHD THD BSHD_2SBHD SBHD_2BSHD THD_2BSHD THD_2SBHD BHSD QKV_Format_NOT_SET",
    "NVTE_Bias_Type": "NO_BIAS PRE_SCALE_BIAS POST_SCALE_BIAS ALIBI",
    "NVTE_Mask_Type": """NO_MASK PADDING_MASK CAUSAL_MASK PADDING_CAUSAL_MASK CAUSAL_BOTTOM_RIGHT_MASK
        PADDING_CAUSAL_BOTTOM_RIGHT_MASK""",
    "NVTE_Softmax_Type": "VANILLA_SOFTMAX OFF_BY_ONE_SOFTMAX LEARNABLE_SOFTMAX",
    "NVTE_Fused_Attn_Backend": "No_Backend=-1 F16_arbitrary_seqlen=1 FP8=2",
    "NVTEScalingMode": """DELAYED_TENSOR_SCALING MXFP8_1D_SCALING BLOCK_SCALING_1D BLOCK_SCALING_2D NVFP4_1D_SCALING
        INVALID_SCALING=100""",
}
_ENUMS = {
    "Float8BlockScaleTensorFormat": "GEMM_READY COMPACT INVALID",
    "CommOverlapType": "RS AG",
    "CommOverlapAlgo": """BULK_OVERLAP_AG BULK_OVERLAP_RS SPLIT_PIPELINED_AG_P2P SPLIT_PIPELINED_RS
        SPLIT_PIPELINED_RS_P2P ATOMIC_GEMM_RS ATOMIC_GEMM_AG_P2P ATOMIC_GEMM_RS_P2P EXTERNAL_BULK_OVERLAP_AG""",
    "FP8FwdTensors": """GEMM1_INPUT GEMM1_WEIGHT GEMM1_OUTPUT GEMM2_INPUT GEMM2_WEIGHT GEMM2_OUTPUT GEMM3_INPUT
        GEMM3_WEIGHT GEMM3_OUTPUT""",
    "FP8BwdTensors": "GRAD_OUTPUT1 GRAD_INPUT1 GRAD_OUTPUT2 GRAD_INPUT2 GRAD_OUTPUT3 GRAD_INPUT3",
    "NVTERoutingMapFormat": "BYTEMAP BITMAP_U8",
    "NVTEQBHistogramMode": "TWO_KERNEL FUSED_ATOMIC",
}


class NativeModule(ModuleType):
    """`transformer_engine_torch` in PyTorch; an attribute without an implementation is a class that raises."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)

        def missing(*_args: Any, **_kwargs: Any) -> Any:
            raise NotImplementedError(f"{NATIVE_MODULE}.{name}: this kernel needs a GPU and has no CPU implementation")

        # A class and not a function: TE names some of them in type annotations.
        return type(name, (), {"__new__": missing})


def native_module() -> NativeModule:
    """A new `transformer_engine_torch` for the installed TE."""
    module: Any = NativeModule(NATIVE_MODULE)
    names = dict(_NVTE_ENUMS)
    major, minor = importlib.metadata.version("transformer_engine").split(".")[:2]
    if (int(major), int(minor)) < (2, 16):
        names["NVTE_Fused_Attn_Backend"] += " F16_max512_seqlen=0"
    vars(module).update({name: enumeration(name, members, "NVTE_") for name, members in names.items()})
    vars(module).update({name: enumeration(name, members) for name, members in _ENUMS.items()})
    module.DType = DType
    module.get_cudnn_version, module.get_cublasLt_version = (lambda: 92000), (lambda: 130100)
    module.get_num_cublas_streams = lambda: 4
    # TE's own unfused attention runs.
    no_backend = module.NVTE_Fused_Attn_Backend.NVTE_No_Backend
    module.get_fused_attn_backend = lambda *_: (no_backend, "there is no GPU")
    vars(module).update(KERNELS)
    return module


class _Finder(importlib.abc.MetaPathFinder):
    """Loads `transformer_engine.common` without its libraries, and gives it `native_module` as its extension."""

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> Any:
        if name != _CHANGED_MODULE:
            return None
        spec: Any = importlib.machinery.PathFinder.find_spec(name, path, target)
        execute = spec.loader.exec_module

        def exec_module(module: Any) -> None:
            with replaced(os.environ, NVTE_PROJECT_BUILDING="1"):
                execute(module)
            module.load_framework_extension = lambda _framework: sys.modules.update({NATIVE_MODULE: native_module()})

        spec.loader.exec_module = exec_module
        return spec


def install() -> None:
    """Makes the next import of TE use the kernels of `te_kernels`. Raises RuntimeError if TE was imported before."""
    if "transformer_engine" in sys.modules:
        raise RuntimeError("transformer_engine was imported before the CPU adaptation: install the adaptation first")
    if not any(isinstance(finder, _Finder) for finder in sys.meta_path):
        sys.meta_path.insert(0, _Finder())
