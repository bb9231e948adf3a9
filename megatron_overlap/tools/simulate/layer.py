"""Passes of one rank: transformer layer, embedding and logits, forward and backward, and the passes of generation."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from typing import Literal

from megatron_overlap.autotune.cost_model import LOSS_BYTES, MAIN_GRADIENT_BYTES, CollectiveKind, CostModel
from megatron_overlap.config.cluster import Elementwise
from megatron_overlap.tools.simulate.experts import ExpertLayer, expert_ops
from megatron_overlap.tools.simulate.job import Job
from megatron_overlap.tools.simulate.linear import Linear, LinearOverlap, Method, fastest, simulated, unsupported_reason
from megatron_overlap.tools.simulate.passes import Op, Pass, Sync, with_rank_skew

_LOSS_SUMS = 3  # all-reduces over tensor ranks: maximum, logit of the label, sum of exponentials
_BATCH_MESSAGES = 4  # broadcasts of the first tensor rank: two headers, integers, the loss mask

# (forward, backward) calls of torch operators per micro-batch, counted with a TorchDispatchMode on the local layers of
# Megatron-Core 0.19.2: difference of three layers and two, GPT and LLaMA, tp2 with sequence parallelism.
_LAYER_CALLS = (65, 131)
_ROTARY_CALLS = (54, 44)
_FIRST_CALLS = (130, 10)
_LAST_CALLS = (66, 50)
OVERLAPPED_CALLS = 23  # additional ones of one pass of an overlapped linear layer, the mean of 18 passes


class Layers:
    """The passes of a job with the costs of a machine.

    With `forward_only` no backward pass follows, and method `auto` selects by the forward pass. `cached` are the tokens
    of keys and values that attention reads for each row of a decode; 0: the rows are sequences.
    """

    def __init__(self, job: Job, model: CostModel, *, forward_only: bool = False, cached: int = 0) -> None:
        self.job, self.model, self.forward_only, self.cached = job, model, forward_only, cached
        self.tensor_link = model.link(job.tensor)  # tensor parallel ranks are adjacent
        self._overlap = job.tensor_overlap
        if self._overlap.method == "fused" and unsupported_reason("fused", self.tensor_link):
            self._overlap = LinearOverlap("p2p")  # as the plugin runs such a call
        shape = job.model
        # Columns of one rank.
        self._ffn = shape.ffn_hidden_size // job.tensor
        self._fc1_width = self._ffn * (2 if shape.swiglu else 1)
        self._queries = shape.head_size * shape.num_attention_heads // job.tensor
        self._keys = shape.head_size * shape.num_query_groups // job.tensor
        self._qkv_width = self._queries + 2 * self._keys

    @cached_property
    def forward(self) -> Pass:
        return self.skewed(*self._forward)

    @cached_property
    def _forward(self) -> tuple[Op, ...]:
        add = self._elementwise("add", self.job.hidden_elements)
        attention = (self._column("qkv", self._qkv_width), self._rotary(), *self._attention())
        projected = (*attention, self._row("proj", self._queries), add)
        return self._norm(), *projected, self._norm(), *self._mlp(), add, self._calls(self._layer_calls(backward=False))

    @cached_property
    def backward(self) -> Pass:
        """Backward of one layer, recomputation included."""
        job = self.job
        ops = (
            *self._mlp(backward=True),
            self._norm(backward=True),
            self._row("proj", self._queries, backward=True),
            *self._attention(backward=True),
            self._rotary(backward=True),
            self._column("qkv", self._qkv_width, backward=True),
            self._norm(backward=True),
            self.accumulated(job.layer_parameters() / job.tensor + job.expert_parameters()),
            self._calls(self._layer_calls(backward=True)),
        )
        return self.skewed(*_named(self._recomputed(), "again"), *_named(ops, "grad"))

    def _mlp(self, *, backward: bool = False) -> Sequence[Op]:
        experts, model = self.job.experts, self.job.model
        if experts is None:
            return self._dense("fc", self._ffn, backward)
        width = experts.shape.shared // self.job.tensor
        shared = self._dense("shared fc", width, backward) if experts.shape.shared else ()
        tokens = int(self.job.hidden_elements) // model.hidden_size
        return expert_ops(ExpertLayer(self.model, experts, model.hidden_size, model.swiglu, tokens), shared, backward)

    def _dense(self, name: str, ffn: int, backward: bool) -> Sequence[Op]:
        ops = (
            self._column(f"{name}1", ffn * (2 if self.job.model.swiglu else 1), backward=backward),
            self._activation(ffn, backward=backward),
            self._row(f"{name}2", ffn, backward=backward),
        )
        return ops[::-1] if backward else ops

    def _recomputed(self) -> tuple[Op, ...]:
        """Operations that the backward computes again."""
        ops, job = self._forward, self.job
        match job.recompute:
            case "full":
                plugin = job.tensor > 1 and job.tensor_overlap.method in ("p2p", "auto")
                skips_output = plugin and job.recompute_output == "skip"
                return tuple(op for op in ops if not (skips_output and op.name == "fc2"))
            case "needed":
                return ops[: [op.name for op in ops].index("fc2")]
            case "selective":
                return tuple(op for op in ops if op.name in ("scores", "repeat", "attention"))
            case "half":
                elementwise = tuple(op for op in ops if op.name in ("norm", "rotary", "activation"))
                return (*elementwise, self._column("keys", self._keys), self._column("gate", self._ffn))
            case "none":
                return ()

    @cached_property
    def first(self) -> tuple[Pass, Pass]:
        """Forward and backward of the embedding, with the reduce-scatter over the tensor ranks."""
        job = self.job
        moved, table = job.rows * job.model.hidden_size, job.table_parameters / job.tensor
        forward = [self._memory("embedding", 3 * moved)]
        if job.tensor > 1:
            kind: CollectiveKind = "reduce_scatter" if job.sequence_parallel else "all_reduce"
            batch_us = _BATCH_MESSAGES * self.model.message_us(0, self.tensor_link)
            forward += [_exposed("batch", batch_us), _exposed("embedding sum", self._collective_us(kind, moved))]
        backward = [self._memory("embedding", 3 * moved), self.accumulated(table), self._calls(_FIRST_CALLS[1])]
        if job.tensor > 1 and job.sequence_parallel:
            backward.insert(0, _exposed("embedding gather", self._collective_us("all_gather", moved)))
        return self.skewed(*forward, self._calls(_FIRST_CALLS[0])), self.skewed(*_named(backward, "grad"))

    @cached_property
    def last(self) -> tuple[Pass, Pass]:
        """Forward and backward of the logits and the loss."""
        columns = self.job.vocabulary // self.job.tensor
        forward = [self._norm(), self._column("logits", columns), self._loss(columns)]
        if self.job.tensor > 1:
            sum_us = self.model.collective_us("all_reduce", 4.0 * self.job.rows, self.tensor_link)
            forward.append(_exposed("loss sums", _LOSS_SUMS * sum_us))
        backward = [
            self._loss(columns, backward=True),
            self._column("logits", columns, backward=True),
            self._norm(backward=True),
            self.accumulated(self.job.table_parameters / self.job.tensor),
            self._calls(_LAST_CALLS[1]),
        ]
        return self.skewed(*forward, self._calls(_LAST_CALLS[0])), self.skewed(*_named(backward, "grad"))

    def skewed(self, *ops: Op) -> Pass:
        """The pass of the operations with the rank skew and the host of the machine."""
        # The host may take longer to enqueue the messages than the device to run the operations.
        host_us = sum(op.enqueue_us for op in ops) - sum(op.time_us for op in ops)
        return with_rank_skew([*ops, Op("host", host_us)] if host_us > 0 else ops, self.model.late_us)

    def _layer_calls(self, *, backward: bool) -> int:
        return _LAYER_CALLS[backward] + (_ROTARY_CALLS[backward] if self.job.model.rotary else 0)

    def _memory(self, name: str, elements: float) -> Op:
        return Op(name, self.model.memory_us(elements * self.model.item_bytes))

    def _elementwise(self, kind: Elementwise, outputs: float, *, name: str | None = None, backward: bool = False) -> Op:
        return Op(name or kind, self.model.elementwise_us(kind, outputs, backward=backward))

    def _norm(self, *, backward: bool = False) -> Op:
        kind: Elementwise = "rms_norm" if self.job.model.normalization == "RMSNorm" else "layer_norm"
        return self._elementwise(kind, self.job.hidden_elements, name="norm", backward=backward)

    def _activation(self, ffn: int, *, backward: bool = False) -> Op:
        kind: Elementwise = "swiglu" if self.job.model.swiglu else "gelu"
        return self._elementwise(kind, self.job.rows * ffn, name="activation", backward=backward)

    def _rotary(self, *, backward: bool = False) -> Op:
        elements = self.job.rows * (self._queries + self._keys) if self.job.model.rotary else 0
        return self._elementwise("rotary", elements, backward=backward)

    def _loss(self, columns: int, *, backward: bool = False) -> Op:
        moved = LOSS_BYTES[backward] * self.job.rows * columns
        return Op("loss", self.model.memory_us(moved, "loss", backward=backward))

    def accumulated(self, parameters: float) -> Op:
        """Accumulation into the main gradients, if the GEMM does not do it."""
        moved = 0.0 if self.job.fused_accumulation else parameters * (MAIN_GRADIENT_BYTES + self.model.item_bytes)
        return Op("accumulate", self.model.memory_us(moved, "accumulate"))

    def _calls(self, calls: int) -> Op:
        """Host time of torch calls, if the device does not hide it."""
        return Op("calls", self.model.calls_us(calls))

    def _collective_us(self, kind: CollectiveKind, elements: float) -> float:
        return self.model.collective_us(kind, elements * self.model.item_bytes, self.tensor_link)

    def _column(self, name: str, columns: int, *, backward: bool = False) -> Op:
        return self._linear(name, columns, self.job.model.hidden_size, column=True, backward=backward)

    def _row(self, name: str, width: int, *, backward: bool = False) -> Op:
        return self._linear(name, self.job.model.hidden_size, width, column=False, backward=backward)

    def _linear(self, name: str, n: int, k: int, *, column: bool, backward: bool) -> Op:
        job = self.job
        if job.tensor > 1 and not job.sequence_parallel:
            return self._all_reduced(name, n, k, moved=column is backward, backward=backward)
        linear = Linear(self.model, self.tensor_link, self._overlap, job.rows, n, k)
        if linear.overlap.method == "auto":
            linear = fastest(linear, column, self.forward_only)
        run = simulated(linear, column, backward)
        sync: Sync | None = None
        if job.tensor > 1:
            sync = "before" if column is not backward else "after"
        calls = OVERLAPPED_CALLS if job.tensor > 1 and linear.overlap.method == "p2p" else 0
        time_us, enqueue_us = run.time_us + self.model.calls_us(calls), linear.enqueue_us(run)
        return Op(name, time_us, run.exposed_us, sync=sync, slack_us=run.slack_us, enqueue_us=enqueue_us)

    def _all_reduced(self, name: str, n: int, k: int, *, moved: bool, backward: bool) -> Op:
        """A layer without sequence parallelism: all-reduce of the row output or of the column input gradient.

        As in the stock path, the all-reduce of dgrad overlaps wgrad unless the method is `serial`.
        """
        rows, model = self.job.rows, self.model
        gemm = model.gemm_us(rows, k, n) if backward else model.gemm_us(rows, n, k)
        wgrad = model.gemm_us(n, k, rows) if backward else 0.0
        move = self._collective_us("all_reduce", rows * (k if backward else n)) if moved else 0.0
        sync: Sync | None = "after" if moved else None
        if not backward or self.job.tensor_overlap.method == "serial":
            return Op(name, gemm + move + wgrad, tensor_us=move, sync=sync)
        # wgrad runs slower during the all-reduce. The longer of the two ends afterwards.
        speed = model.compute_rate("collective", 2 * self.tensor_link.collective_rate)
        concurrent = max(move, wgrad + min(move, wgrad / speed) * (1 - speed)) if moved else wgrad
        return Op(name, gemm + concurrent, tensor_us=max(0.0, move - wgrad / speed), sync=sync)

    def _attention(self, *, backward: bool = False) -> Iterable[Op]:
        """Causal attention. Over context ranks a ring: each step overlaps the transfer of the next keys and values."""
        job, model = self.job, self.job.model
        if self.cached:
            yield self._memory("attention", 2.0 * job.rows * self.cached * self._keys)
            return
        heads = model.num_attention_heads // job.tensor
        flops = 2.0 * job.micro_batch_size * heads * model.head_size * job.seq_length**2 / job.context
        if job.materializes_scores:
            # All scores, masked ones included: two products forward, four backward.
            whole = self.model.attention_us(flops * (4.0 if backward else 2.0), backward=backward, fused=False)
            scores = job.micro_batch_size * heads * job.seq_length**2 / job.context
            yield self._elementwise("scores", scores, backward=backward)
            if model.num_query_groups < model.num_attention_heads:
                moved = 2 * job.rows * (self._keys + self._queries)
                yield self._elementwise("repeat", moved, backward=backward)
        else:
            # Two products forward and five backward, each 2 s^2 d, half of it masked.
            whole = self.model.attention_us(flops * (2.5 if backward else 1.0), backward=backward)
        if job.context == 1:
            yield Op("attention", whole)
            return
        keys = 2 * job.rows * model.head_size * model.num_query_groups / job.tensor * self.model.item_bytes
        move = self.model.message_us(keys * (2 if backward else 1), self.model.link(job.context, job.tensor))
        step = whole / job.context
        time = step + (job.context - 1) * max(step, move)
        yield Op("attention", time, context_us=time - whole)


def _exposed(name: str, time_us: float) -> Op:
    """Communication of the tensor parallel ranks that overlaps no computation."""
    return Op(name, time_us, tensor_us=time_us, sync="before")


def _named(ops: Iterable[Op], suffix: str) -> list[Op]:
    return [replace(op, name=f"{op.name} {suffix}") for op in ops]


PROMPTS = (128, 512, 2048, 8192)
BATCHES = (1, 8, 64)


def generation_us(
    job: Job, model: CostModel, methods: Mapping[str, Method | Literal["auto"]]
) -> dict[str, dict[str, float]]:
    """Microseconds of one layer by the names of `methods`: `prefill N` of N tokens, and `decode N` of N requests.

    Every request of a decode has `job.seq_length` tokens in the cache. The inference engines of Megatron pad the rows
    of a pass to a multiple of the tensor parallel size under sequence parallelism.
    """
    passes = {f"prefill {tokens}": (tokens, 0) for tokens in PROMPTS}
    passes |= {f"decode {batch}": (batch, job.seq_length) for batch in BATCHES}
    return {
        text: {
            name: Layers(_alone(job, rows, method), model, forward_only=True, cached=cached).forward.time_us
            for name, (rows, cached) in passes.items()
        }
        for text, method in methods.items()
    }


def _alone(job: Job, rows: int, method: Method | Literal["auto"]) -> Job:
    """The tensor parallel ranks of one replica, with one sequence of `rows` tokens."""
    multiple = job.tensor if job.sequence_parallel else 1
    replicas = 1 if job.experts is None else max(1, job.experts.parallel // job.tensor)
    return replace(
        job,
        seq_length=-(-rows // multiple) * multiple,
        micro_batch_size=1,
        global_batch_size=replicas,
        data=replicas,
        context=1,
        tensor_overlap=LinearOverlap(method, copies=job.tensor_overlap.copies),
        split="none",
    )
