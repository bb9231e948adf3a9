"""Model FLOPs of a training step and peak FLOP/s of a device: the two figures of the MFU.

The convention is that of Megatron's throughput line, see `docs/compare.md`. Norms, activations, the embedding look-up
and the router of experts count nothing. Published figures that count the whole attention square are higher. Peak rates
are dense. Data sheets often print twice as much, the figure with sparsity.
"""

import functools
import re
import statistics
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from megatron_overlap.config import LaunchConfig, ModelConfig
from megatron_overlap.config.cluster import Precision
from megatron_overlap.config.megatron_args import number_after
from megatron_overlap.tools.launch.processes import RankCommand, run_ranks

CONVENTION = "model FLOPs, forward + backward, causal half of attention, no recomputation (as Megatron logs them)"
VOCABULARY_MULTIPLE = 128  # default of --make-vocab-size-divisible-by in Megatron

EXPERTS_FLAG = "--num-experts"
# Arguments that replace or extend the model of the `model` section.
_OTHER_MODELS = (
    *("--moe-layer-freq", "--moe-latent-size", "--multi-latent-attention", "--mtp-num-layers", "--hybrid-"),
    *("--is-hybrid-model", "--experimental-attention-variant", "--linear-attention-freq", "--attention-output-gate"),
    *("--spec", "--heterogeneous-", "--use-checkpoint-args"),
)

# TFLOP/s with dense bf16 or fp16 inputs and fp32 accumulation, by a part of the device name that the driver reports.
# The first match counts, so longer names come first. Devices that are not in the table are measured.
HALF_TFLOPS: Mapping[str, float] = {
    "GB200": 2500.0,  # GB200 NVL72 data sheet: 5 PFLOP/s a GPU with sparsity
    "B200": 2250.0,  # HGX B200 data sheet: 4.5 PFLOP/s a GPU with sparsity
    "GH200": 989.4,  # GH200 data sheet: 1979 with sparsity
    "H200 NVL": 835.5,  # H200 data sheet: 1671 with sparsity
    "H200": 989.4,  # H200 data sheet, SXM: 1979 with sparsity
    "H100 NVL": 835.5,  # H100 NVL data sheet: 1671 with sparsity
    "H100 PCIe": 756.4,  # H100 architecture white paper, table of peak rates, PCIe
    "H100": 989.4,  # H100 architecture white paper, table of peak rates, SXM5
    "H800 PCIe": 756.4,  # rates of the H100, fewer NVLinks
    "H800": 989.4,
    "H20": 148.0,  # H20 data sheet
    "A100": 311.9,  # A100 architecture white paper, every form factor
    "A800": 311.9,  # rates of the A100, fewer NVLinks
    "A30": 165.0,  # A30 data sheet
    "A40": 149.7,  # A40 data sheet
    "A10": 125.0,  # A10 data sheet
    "L40S": 362.1,  # L40S data sheet: 733 with sparsity
    "L40": 181.1,  # L40 data sheet: 362 with sparsity
    "L20": 119.5,  # L20 data sheet
    "L4": 121.0,  # L4 data sheet: 242 with sparsity
}


class UnknownFlopsError(ValueError):
    """The FLOPs of this model are unknown; the text names the argument."""


@dataclass(frozen=True)
class ExpertShape:
    """Experts of a layer: their number, those that a token passes, hidden size of each and of the shared one."""

    count: int
    topk: int
    ffn_hidden_size: int
    shared: int = 0

    @property
    def active_ffn_hidden_size(self) -> int:
        """Of the experts that a token passes, together."""
        return self.topk * self.ffn_hidden_size + self.shared


@dataclass(frozen=True)
class Peak:
    """Peak rate of a device (of a rank on CPU) in 10^12 operations per second, and the data sheet or measurement."""

    tflops: float
    source: str


def token_flops(
    model: ModelConfig, seq_length: int, padded_vocab_size: int, experts: ExpertShape | None = None
) -> dict[str, float]:
    """FLOPs of one token of a full sequence, forward and backward, by part of the model. `experts` replace the MLP."""
    gemm = 2 * 3  # multiply-add, in forward and for the gradients of input and weight
    ffn_hidden_size = model.ffn_hidden_size if experts is None else experts.active_ffn_hidden_size
    hidden, layers = model.hidden_size, model.num_layers
    queries = model.head_size * model.num_attention_heads
    keys_and_values = 2 * model.head_size * model.num_query_groups
    mlp_gemms = 3 if model.swiglu else 2  # SwiGLU: gate, up and down
    return {
        "projections": float(gemm * layers * hidden * (queries + keys_and_values + queries)),  # QKV and output
        "attention": gemm * layers * 2 * queries * seq_length / 2,  # scores, their product with the values; causal
        "mlp": float(gemm * layers * mlp_gemms * hidden * ffn_hidden_size),
        "logits": float(gemm * hidden * padded_vocab_size),
    }


def padded_vocab_size(vocab_size: int, tensor: int, multiple: int = VOCABULARY_MULTIPLE) -> int:
    """Rows of the embedding in Megatron: each tensor parallel rank holds a multiple of `multiple`."""
    step = multiple * tensor
    return -(-vocab_size // step) * step


def vocabulary_multiple(cfg: LaunchConfig) -> int:
    """The rows of the embedding on each tensor parallel rank are a multiple of this number."""
    return number_after("--make-vocab-size-divisible-by", cfg.megatron_args) or VOCABULARY_MULTIPLE


def step_flops(cfg: LaunchConfig) -> float:
    """Model FLOPs of one iteration over all ranks.

    Raises as `known_model`, and UnknownFlopsError for documents: their attention depends on their lengths.
    """
    known_model(cfg.megatron_args)
    if cfg.overlap.varlen.method != "none":
        what = "the FLOPs of attention depend on the lengths of the documents"
        raise UnknownFlopsError(f"overlap.varlen.method: {cfg.overlap.varlen.method}: {what}")
    vocabulary = padded_vocab_size(cfg.model.vocab_size, cfg.parallel.tensor, vocabulary_multiple(cfg))
    each = token_flops(cfg.model, cfg.train.seq_length, vocabulary, experts=expert_shape(cfg))
    return sum(each.values()) * (cfg.train.global_batch_size * cfg.train.seq_length)


def expert_shape(cfg: LaunchConfig) -> ExpertShape | None:
    """The experts of each layer by the arguments of Megatron; None: the layers are dense."""
    args = cfg.megatron_args
    if (count := number_after(EXPERTS_FLAG, args)) is None:
        return None
    return ExpertShape(
        count,
        number_after("--moe-router-topk", args) or 2,  # default in Megatron
        number_after("--moe-ffn-hidden-size", args) or cfg.model.ffn_hidden_size,
        number_after("--moe-shared-expert-intermediate-size", args) or 0,
    )


def known_model(megatron_args: Sequence[str]) -> None:
    """Raises an UnknownFlopsError if an argument changes the model of the `model` section."""
    for arg in megatron_args:
        if arg.startswith(_OTHER_MODELS):
            raise UnknownFlopsError(f"megatron_args: {arg}: the FLOPs of that model are unknown")


def known_peak(device_name: str, precision: Precision) -> Peak | None:
    """The figure of the data sheet; None if the table has none."""
    # A setting decides whether an fp32 GEMM runs in TF32. A MIG instance is a part of the device.
    if precision == "fp32" or "MIG" in device_name:
        return None
    for name, tflops in HALF_TFLOPS.items():
        # Match whole words: `A100` contains `A10`, and `GH200` contains `H200`.
        if re.search(rf"(?<![A-Z0-9]){name}(?![A-Z0-9])", device_name, re.IGNORECASE):
            return Peak(tflops, f"data sheet of the {name}, dense {precision}")
    return None


@functools.cache
def find_peak(name: str, device: Literal["cpu", "cuda"], precision: Precision, threads: int, world_size: int) -> Peak:
    """The peak rate for a run on the device `name`: from the table, or measured once on this machine.

    Raises RunError if the measurement failed.

    A measurement times large square GEMMs in the precision and with the threads of the run, on CPU on all ranks at
    once. Ranks that run together share caches, memory and clock rate, as they do in the run.
    """
    if device == "cuda" and (known := known_peak(name, precision)) is not None:
        return known
    ranks = world_size if device == "cpu" else 1
    measure, env = [sys.executable, "-m", "megatron_overlap.tools.gemm_rate"], {"OMP_NUM_THREADS": str(threads)}
    with tempfile.TemporaryDirectory() as folder:
        files = [Path(folder, str(rank)) for rank in range(ranks)]
        commands = [RankCommand(rank, [*measure, str(file), device, precision], env) for rank, file in enumerate(files)]
        run_ranks(commands, timeout_s=120, log_dir=Path(folder) / "logs")
        rates = [float(file.read_text()) for file in files]
    source = f"measured: best square {precision} GEMM"
    if device == "cpu":
        source += f", {ranks} processes at once, {threads} thread{'s' if threads > 1 else ''} each"
    return Peak(statistics.median(rates), source)
