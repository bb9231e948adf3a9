"""The layouts in which `scripts/equality.py` trains its models."""

from __future__ import annotations

from dataclasses import dataclass, replace


@dataclass(frozen=True)
class Layout:
    """How ranks share the model.

    Attributes:
        sharded: with the distributed optimizer.
        split: the plugin's `overlap.tensor.split`; with `sequence` a micro-batch is one sequence.
        split_at: the plugin's `overlap.tensor.split_at`; None: its default.
        recompute: activation recomputation: `none`, `selective` (core attention), or `full` (each layer).
        pipeline: pipeline stages.
        documents: a micro-batch is whole documents, and context parallelism is balanced attention.
        expert: expert-parallel ranks, among the data-parallel ranks; more than 1 makes a mixture of experts.
        experts: flags of the mixture of experts.
    """

    name: str
    tensor: int = 1
    data: int = 1
    sequence_parallel: bool = False
    sharded: bool = False
    context: int = 1
    split: str = "none"
    split_at: float | None = None
    recompute: str = "none"
    pipeline: int = 1
    documents: bool = False
    expert: int = 1
    experts: tuple[str, ...] = ()

    @property
    def ranks(self) -> int:
        """Number of ranks."""
        return self.tensor * self.context * self.pipeline * self.data

    @property
    def without_context(self) -> Layout:
        """The same layout without context parallelism: stock has none on a CPU. Its attention is stock."""
        return replace(self, name=f"{self.name}-one-context-rank", context=1) if self.context > 1 else self

    @property
    def flags(self) -> list[str]:
        """Further flags of Megatron."""
        if self.expert == 1:
            return []
        sizes = ["--expert-model-parallel-size", str(self.expert), "--expert-tensor-parallel-size", "1"]
        return [*MIXTURE, *self.experts, *sizes]

    @property
    def calls(self) -> frozenset[str]:
        """What must be overlapped, by kind and direction."""
        calls = set()
        if self.tensor > 1:
            calls = {f"{kind} {way}" for kind in ("column", "row") for way in ("forward", "dgrad", "wgrad")}
        if self.context > 1:
            calls |= {"attention forward", "attention dgrad"}
        if self.expert > 1:
            calls |= {"expert forward", "expert dgrad", "expert wgrad"}
        elif self.data > 1:
            calls |= {"data wgrad", "data forward"} if self.sharded else {"data wgrad"}
        return frozenset(calls)


MIXTURE = (
    *("--num-experts", "8", "--moe-token-dispatcher-type", "alltoall"),
    *("--moe-router-load-balancing-type", "aux_loss", "--moe-aux-loss-coeff", "0.01"),
)
TOP2 = ("--moe-router-topk", "2")
GROUPED = "--moe-grouped-gemm"  # local layers have none
ALONE = Layout("TP1")
SEQUENCE_PARALLEL = (
    Layout("TP2+SP", tensor=2, sequence_parallel=True),
    Layout("TP4+SP", tensor=4, sequence_parallel=True),
    Layout("TP2xDP2+SP", tensor=2, data=2, sequence_parallel=True, sharded=True),
    Layout("PP2xTP2+SP", tensor=2, pipeline=2, sequence_parallel=True),
)
LAYOUTS = (
    Layout("TP2", tensor=2),
    Layout("TP4", tensor=4),
    *SEQUENCE_PARALLEL,
    Layout("TP2-batch-overlap", tensor=2, split="batch"),
    Layout("TP2xDP2-batch-overlap", tensor=2, data=2, sharded=True, split="batch"),
    *(replace(each, name=f"{each.name}-batch-split", split="batch") for each in SEQUENCE_PARALLEL),
    *(replace(each, name=f"{each.name}-sequence-split", split="sequence") for each in SEQUENCE_PARALLEL),
    Layout("TP2+SP-sequence-split-at-0.3", tensor=2, sequence_parallel=True, split="sequence", split_at=0.3),
    *(
        Layout(f"TP2+SP-{split}-split-{each}-recompute", 2, sequence_parallel=True, split=split, recompute=each)
        for split in ("batch", "sequence")
        for each in ("full", "selective")
    ),
    Layout("TP2-full-recompute", tensor=2, recompute="full"),
    Layout("TP2+SP-full-recompute", tensor=2, sequence_parallel=True, recompute="full"),
    Layout("DP2", data=2),
    Layout("DP4", data=4),
    Layout("DP2+DO", data=2, sharded=True),
    Layout("DP4+DO", data=4, sharded=True),
    Layout("UP2", context=2),
    Layout("UP4", context=4),
    Layout("UP2xTP2+SP", tensor=2, context=2, sequence_parallel=True),
    Layout("UP2xDP2", context=2, data=2),
    Layout("varlen-CP2", context=2, documents=True),
    Layout("varlen-CP2xTP2+SP", tensor=2, context=2, sequence_parallel=True, documents=True),
    Layout("EP2", data=2, expert=2, experts=TOP2),
    Layout("EP4", data=4, expert=4, experts=TOP2),
    Layout("EP2-top1", data=2, expert=2, experts=("--moe-router-topk", "1", "--moe-router-pre-softmax")),
    Layout("EP2xTP2+SP", tensor=2, data=2, sequence_parallel=True, expert=2, experts=TOP2),
    Layout("EP2xDP2+DO", data=4, sharded=True, expert=2, experts=TOP2),
    Layout("EP2-shared", data=2, expert=2, experts=(*TOP2, "--moe-shared-expert-intermediate-size", "128")),
    Layout("EP2-dropping", data=2, expert=2, experts=(*TOP2, "--moe-expert-capacity-factor", "1.0")),
    Layout("EP2-grouped", data=2, expert=2, experts=(*TOP2, GROUPED)),
)
