"""Compares the simulator with published measurements and prints every row, also those outside their bounds.

    python scripts/simulate_papers.py [--json FILE]

Each machine has one profile, and no parameter belongs to a single row. Rows whose published number is in a profile are
marked: they do not test the model. Every number in the column `model` is modelled.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from megatron_overlap.autotune.cost_model import CostModel
from megatron_overlap.config import ModelConfig
from megatron_overlap.config.cluster import load_cluster_profile
from megatron_overlap.config.launch import PRESETS
from megatron_overlap.tools.compare.flops import ExpertShape
from megatron_overlap.tools.simulate.job import Experts, Job, Recompute
from megatron_overlap.tools.simulate.linear import Linear, LinearOverlap
from megatron_overlap.tools.simulate.step import StepTime, simulate_step
from megatron_overlap.tools.simulate.sweep import memory_of

PEAK = 989.4
PLAIN = LinearOverlap("serial", save_gathered=True)
COMPILED = LinearOverlap("compiled", "direct", chunks_per_rank=1, save_gathered=True)


@dataclass(frozen=True)
class Row:
    """One published figure and the model's.

    Attributes:
        source: paper or page.
        what: which figure.
        unit: ms, tokens/s, or points of a percentage.
        published, model: the figures.
        bound: largest error asked for: points, or percent of a figure that is none; None: shown, nothing asked.
        used: what of the row is in the profile, empty where nothing is.
    """

    source: str
    what: str
    unit: str
    published: float
    model: float
    bound: float | None
    used: str = ""

    @property
    def error(self) -> float:
        """Percent, or points."""
        difference = self.model - self.published
        return difference if self.unit.startswith("%") else 100 * difference / self.published

    @property
    def verdict(self) -> str:
        """Whether the row is within its bound."""
        if self.bound is None:
            return "-"
        return "ok" if abs(self.error) <= self.bound else "MISS"


def flux() -> Iterator[Row]:
    """m = 4096, (n, k) = (49152, 12288) and (12288, 49152) over 8 ranks."""
    published = {
        "a800": (3.099, 3.100, 2.469, 2.508),
        "h800": (1.429, 1.408, 0.957, 0.932),
        "l20_pcie": (16.946, 17.664, 5.903, 5.730),
    }
    for name, figures in published.items():
        model = CostModel(load_cluster_profile(name))
        link = model.link(8)
        times = []
        for method in ("serial", "fused"):
            times.append(Linear(model, link, LinearOverlap(method), 4096, 6144, 12288).column_forward().time_us)
            times.append(Linear(model, link, LinearOverlap(method), 4096, 12288, 6144).row_forward().time_us)
        whats = ("AG+GEMM serial", "GEMM+RS serial", "AG+GEMM fused", "GEMM+RS fused")
        for what, shown, time in zip(whats, figures, times, strict=True):
            used = "GEMM and collective" if what == "AG+GEMM serial" else ""
            yield Row("Flux", f"{name} {what}", "ms", shown, time / 1e3, 10, used)


def commfuse() -> Iterator[Row]:
    """MLP of 32 x 4096 tokens, width 4096, 4 ranks."""
    model = CostModel(load_cluster_profile("commfuse"))
    link = model.link(4)
    choices = {
        "serial": LinearOverlap("serial"),
        "sliced": LinearOverlap("sliced"),
        "tail-free": LinearOverlap("p2p", "ring", chunks_per_rank=1, split="all"),
    }
    for (what, choice), published in zip(choices.items(), (122.3, 83.9, 77.1), strict=True):
        first = Linear(model, link, choice, 32 * 4096, 4096, 4096).column_forward()
        second = Linear(model, link, choice, 32 * 4096, 4096, 4096).row_forward()
        used = "rate and link" if what == "serial" else "a third of the rate"
        yield Row("CommFuse", f"MLP {what}", "ms", published, (first.time_us + second.time_us) / 1e3, 5, used)


def torchtitan() -> Iterator[Row]:
    """Asynchronous tensor parallelism against plain, TP8 on H100 of 500 W; asked of the gain alone.

    What is recomputed, and which reduce-scatters the compiler joins to a GEMM, is read from the code of that day
    (torchtitan 820504e, `parallelize_llama.py`).
    """
    model = CostModel(load_cluster_profile("grand_teton"))
    small = ModelConfig.model_validate({"preset": "llama3_8b", **PRESETS["llama3_8b"]})
    for replicas, published in ((8, 6667), (128, 6514)):
        job = Job(small, 8192, 2, 2 * replicas, data=replicas, sequence_parallel=False, recompute="half")
        rate = job.tokens / job.world_size / (simulate_step(job, model).step_us * 1e-6)
        used = "GEMM" if replicas == 8 else ""
        yield Row("torchtitan", f"8B, {replicas} GPUs, FSDP alone, batch 2", "tokens/s", published, rate, None, used)
    rows: tuple[tuple[str, str, int, int, Recompute, float], ...] = (
        ("70B, 256 GPUs, full recompute, batch 16", "llama3_70b", 32, 16, "needed", 9.2),
        ("70B, 128 GPUs, full recompute, batch 16", "llama3_70b", 16, 16, "needed", 12.5),
        ("8B, 64 GPUs, part recomputed, batch 12", "llama3_8b", 8, 12, "half", 9.8),
    )
    for what, preset, replicas, batch, recompute, published in rows:
        shape = ModelConfig.model_validate({"preset": preset, **PRESETS[preset]})
        job = Job(shape, 8192, batch, batch * replicas, tensor=8, data=replicas, recompute=recompute)
        plain = simulate_step(replace(job, tensor_overlap=PLAIN), model).step_us
        gain = 100 * (plain / simulate_step(replace(job, tensor_overlap=COMPILED), model).step_us - 1)
        yield Row("torchtitan", what, "% gain", published, gain, 3)
        if preset == "llama3_70b":
            rate = job.tokens / job.world_size / (plain * 1e-6)
            yield Row("torchtitan", f"{what}, plain", "tokens/s", 597.3 if replicas == 32 else 598, rate, None)


MEGATRON = (
    ("1.7B", 16, 2048, 24, 1, 1, 192, 41),
    ("7.1B", 32, 4096, 30, 2, 1, 192, 47),
    ("16B", 48, 6144, 32, 4, 1, 192, 49),
    ("32B", 56, 7168, 48, 8, 1, 192, 46),
    ("70B", 64, 8192, 84, 8, 2, 384, 42),
    ("119B", 80, 10240, 92, 8, 4, 768, 43),
    ("177B", 96, 12288, 96, 8, 6, 1152, 44),
    ("314B", 128, 16384, 96, 8, 8, 1536, 48),
    ("462B", 144, 18432, 112, 8, 16, 3072, 47),
)
"""Name, heads, hidden size, layers, tensor, pipeline, batch, MFU %: the table of Megatron-LM's README, 48 replicas."""


def megatron() -> Iterator[Row]:
    """The README's table. It leaves out micro-batch, interleaving and type of gradients.

    Taken here: the fastest by the model of micro-batches of 1, 2 and 4 and of no interleaving or one layer a chunk
    that fits in 80 GB, as whoever made the table would have tuned; gradients reduced in bf16.
    """
    model = CostModel(load_cluster_profile("h100_dgx"))
    for name, heads, hidden, layers, tensor, pipeline, batch, published in MEGATRON:
        fields = {"num_layers": layers, "hidden_size": hidden, "num_attention_heads": heads, "vocab_size": 131072}
        shape = ModelConfig.model_validate({"arch": "gpt", "max_position_embeddings": 4096, **fields})
        tried = []
        for micro in (1, 2, 4):
            for virtual in {1, layers // pipeline} if pipeline > 1 else {1}:
                try:
                    job = Job(
                        shape,
                        seq_length=4096,
                        micro_batch_size=micro,
                        global_batch_size=batch,
                        tensor=tensor,
                        pipeline=pipeline,
                        data=48,
                        virtual=virtual,
                        sequence_parallel=tensor > 1,
                        tensor_overlap=LinearOverlap("userbuffers"),
                        gradient_bytes=2,
                    )
                except ValueError:  # micro-batches that cannot be dealt to the stages
                    continue
                if memory_of(job).total <= 80:
                    tried.append((mfu(job, simulate_step(job, model)), micro, virtual))
        best, micro, virtual = max(tried)
        what = f"{name}, tp{tensor} pp{pipeline} (taken: micro-batch {micro}, {virtual} chunks)"
        yield Row("Megatron README", what, "% MFU", published, best, 4, "mean of the table")


def nemo() -> Iterator[Row]:
    """NVIDIA's later benchmarks, with newer software on the same GPU; nothing is asked of these."""
    model = CostModel(load_cluster_profile("h100_dgx"))
    rows = (
        ("8B, 8 GPUs", "llama3_8b", 1, 2, 1, 1, 4, 128, 55.9),
        ("70B, 64 GPUs", "llama3_70b", 4, 2, 4, 5, 2, 128, 50.7),
    )
    for what, preset, tensor, context, pipeline, virtual, data, batch, published in rows:
        shape = ModelConfig.model_validate({"preset": preset, **PRESETS[preset]})
        job = Job(
            shape,
            seq_length=8192,
            micro_batch_size=1,
            global_batch_size=batch,
            tensor=tensor,
            context=context,
            pipeline=pipeline,
            data=data,
            virtual=virtual,
            sequence_parallel=tensor > 1,
            tensor_overlap=LinearOverlap("userbuffers"),
            gradient_bytes=2,
        )
        layout = f"{what}, {job.label()}"
        yield Row("NVIDIA benchmarks", layout, "% MFU", published, mfu(job, simulate_step(job, model)), None)


def experts() -> Iterator[Row]:
    """Megatron Bridge's tables of H100, containers 26.02, 25.11 and 25.09, balanced routing; nothing is asked of these.

    Without a fixed capacity the host waits for the counts of tokens, which the model leaves out. Qwen3 was trained in
    fp8, the model is of bf16. GPT-OSS has windows of 128 tokens in every other layer, modelled as full attention.
    """
    model = CostModel(load_cluster_profile("h100_dgx"))
    gpt_oss = {"num_layers": 36, "hidden_size": 2880, "num_attention_heads": 64, "kv_channels": 64}
    gpt_oss |= {"num_query_groups": 8, "vocab_size": 201088, "ffn_hidden_size": 2880}
    qwen3 = {"preset": "qwen3_30b_a3b", **PRESETS["qwen3_30b_a3b"]}
    rows = (
        ("GPT-OSS 120B, 64 GPUs", gpt_oss, ExpertShape(128, 4, 2880), (4, 1, 16), (1, 1280), 5993),
        ("Qwen3-30B-A3B, 16 GPUs", qwen3, ExpertShape(128, 8, 768), (2, 24, 8), (2, 512), 5275),
        ("Qwen3-30B-A3B, 16 GPUs, fixed capacity", qwen3, ExpertShape(128, 8, 768), (2, 24, 8), (2, 512), 10494),
    )
    for what, fields, shape, (pipeline, virtual, data), (micro, batch), published in rows:
        job = Job(
            ModelConfig.model_validate({"arch": "llama", "max_position_embeddings": 4096, **fields}),
            seq_length=4096,
            micro_batch_size=micro,
            global_batch_size=batch,
            pipeline=pipeline,
            data=data,
            virtual=virtual,
            gradient_bytes=2,
            experts=Experts(shape, 8),
        )
        rate = job.tokens / job.world_size / (simulate_step(job, model).step_us * 1e-6)
        yield Row("Megatron Bridge", f"{what}, {job.label()}, ep8", "tokens/s", published, rate, None)


def mfu(job: Job, step: StepTime) -> float:
    """MFU in percent, causal half of attention."""
    return 100 * job.flops() / job.world_size / (step.step_us * 1e-6) / (PEAK * 1e12)


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, help="also write the rows there")
    options = parser.parse_args()
    rows = [*flux(), *commfuse(), *torchtitan(), *megatron(), *nemo(), *experts()]
    print("| source | row | published | model | error | asked | | of the row, in the profile |")
    print("|---|---|---|---|---|---|---|---|")
    for row in rows:
        digits = 3 if row.source == "Flux" else 1
        sign = " points" if row.unit.startswith("%") else " %"
        asked = "-" if row.bound is None else f"{row.bound:g}{sign}"
        print(
            f"| {row.source} | {row.what} | {row.published:.{digits}f} {row.unit} | {row.model:.{digits}f} | "
            f"{row.error:+.1f}{sign} | {asked} | {row.verdict} | {row.used} |"
        )
    asked_rows = [row for row in rows if row.bound is not None]
    held = sum(row.verdict == "ok" for row in asked_rows)
    print(f"\n{held} of {len(asked_rows)} rows within what is asked; modelled, one profile a machine.")
    if options.json is not None:
        listed = [{**asdict(row), "error": row.error, "verdict": row.verdict} for row in rows]
        options.json.write_text(json.dumps(listed, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
