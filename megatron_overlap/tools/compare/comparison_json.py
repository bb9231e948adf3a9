"""What of a comparison is kept as JSON: the content of compare.json. Pure."""

from __future__ import annotations

from typing import Any

from megatron_overlap.tools.compare.comparison import AgainstReference, Comparison, RunSummary


def comparison_content(comparison: Comparison) -> dict[str, Any]:
    """The content of compare.json."""
    deviations = {
        key: max((d for entry in comparison.against if (d := getattr(entry, key)) is not None), default=None)
        for key in ("max_loss_deviation", "max_grad_norm_deviation")
    }
    result: dict[str, Any] = {
        "runs": [_run_dict(run) for run in comparison.runs],
        "speedup": comparison.headline.speedup.as_dict(),
        **deviations,
        "link": dict(comparison.runs[0].link),
        "versions": dict(comparison.versions),
        "device": dict(comparison.device),
        "against_first": [_against_dict(entry) for entry in comparison.against],
        "settings": dict(comparison.settings),
    }
    if comparison.attribution is not None:
        result["attribution"] = {
            "faster_collective": comparison.attribution.faster_collective.as_dict(),
            "overlap": comparison.attribution.overlap.as_dict(),
        }
    return result


def _run_dict(run: RunSummary) -> dict[str, Any]:
    plugin = run.plugin
    return {
        "name": run.name,
        "step_time_ms": run.step_time_ms.as_dict(),
        "step_times_ms": run.step_times_ms,
        "tokens_per_s": run.tokens_per_s,
        "tokens_per_s_per_device": run.tokens_per_s_per_device,
        "tflops_per_device": run.tflops_per_device,
        "mfu": run.mfu,
        "peak_tflops": run.peak_tflops,
        "peak_source": run.peak_source,
        "flops_convention": run.flops_convention,
        "peak_memory_bytes": run.peak_memory_bytes,
        "losses": run.losses,
        "grad_norms": run.grad_norms,
        "own_loss_deviation": run.own_loss_deviation,
        "own_grad_norm_deviation": run.own_grad_norm_deviation,
        "link": dict(run.link),
        "typical_step": {
            "round": run.typical.round,
            "iteration": run.typical.iteration,
            "step_time_ms": run.typical.time_ms,
        },
        "exposed": None
        if run.exposed is None
        else {
            "step_ms": run.exposed.step_ms.as_dict(),
            "share_of_step": run.exposed.share,
            "floor_ms": run.floor_ms,
            "by_op": [
                {"op": op, "direction": direction, "ms": time_ms, "median_ms": run.exposed.median_by_op[op, direction]}
                for (op, direction), time_ms in run.exposed.by_op.items()
            ],
        },
        "plugin": None
        if plugin is None
        else {
            "active": plugin.active,
            "reason": plugin.reason,
            "overlapped_calls": plugin.overlapped_calls,
            "sent_bytes": plugin.sent_bytes,
            "fallbacks": [vars(fallback) for fallback in plugin.fallbacks],
            "not_fused": dict(plugin.not_fused),
        },
    }


def _against_dict(entry: AgainstReference) -> dict[str, Any]:
    return {
        "name": entry.name,
        "speedup": entry.speedup.as_dict(),
        "speedup_rounds": entry.speedup_rounds,
        "max_loss_deviation": entry.max_loss_deviation,
        "max_grad_norm_deviation": entry.max_grad_norm_deviation,
        "memory_ratio": entry.memory_ratio,
    }
