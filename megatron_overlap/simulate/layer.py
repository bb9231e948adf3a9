"""Forward and backward of one transformer layer, and of the ends of the model, on one rank."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property, lru_cache

from megatron_overlap.simulate.job import Job
from megatron_overlap.simulate.linear import Linear
from megatron_overlap.simulate.play import Played
from megatron_overlap.tune.cost import CostModel, Link

_LOSS_BYTES = 38
_LOSS_GRAD_BYTES = 22


@dataclass(frozen=True, slots=True)
class Op:
    """One operation of a layer in the order they run.

    Attributes:
        name: module and what it does.
        time_us: from start to end.
        tensor_us: part of it that waits for tensor parallel messages with nothing to compute.
        context_us: the same, of context parallel ones.
    """

    name: str
    time_us: float
    tensor_us: float = 0.0
    context_us: float = 0.0


@dataclass(frozen=True, slots=True)
class Pass:
    """Operations that run one after the other."""

    ops: tuple[Op, ...]

    @property
    def time_us(self) -> float:
        return sum(op.time_us for op in self.ops)

    @property
    def tensor_us(self) -> float:
        return sum(op.tensor_us for op in self.ops)

    @property
    def context_us(self) -> float:
        return sum(op.context_us for op in self.ops)

    def __add__(self, other: Pass) -> Pass:
        return Pass(self.ops + other.ops)


@dataclass(frozen=True)
class Layers:
    """The passes of a job on a machine.

    Without sequence parallelism the linear layers end in all-reduces, in Megatron's own order: the one after dgrad
    beside wgrad unless the method is `serial`.
    """

    job: Job
    model: CostModel

    @cached_property
    def tensor_link(self) -> Link:
        """What joins tensor ranks: neighbours in a node."""
        return self.model.link(self.job.tensor)

    @cached_property
    def forward(self) -> Pass:
        """One layer."""
        return Pass(
            (
                self._memory("norm", 4 * self._hidden),
                self._column("qkv", self._qkv_width),
                *self._rotary(),
                self._attention("attention", backward=False),
                self._row("proj", self.job.model.head_size * self.job.model.num_attention_heads // self.job.tensor),
                self._memory("add", 3 * self._hidden),
                self._memory("norm", 4 * self._hidden),
                self._column("fc1", self._ffn * (2 if self.job.model.swiglu else 1)),
                self._memory("activation", (3 if self.job.model.swiglu else 2) * self.job.rows * self._ffn),
                self._row("fc2", self._ffn),
                self._memory("add", 3 * self._hidden),
            )
        )

    @cached_property
    def backward(self) -> Pass:
        """One layer, with what it computes again."""
        job = self.job
        queries = job.model.head_size * job.model.num_attention_heads // job.tensor
        ops = (
            self._row("fc2", self._ffn, backward=True),
            self._memory("activation grad", (5 if job.model.swiglu else 3) * job.rows * self._ffn),
            self._column("fc1", self._ffn * (2 if job.model.swiglu else 1), backward=True),
            self._memory("norm grad", 7 * self._hidden),
            self._row("proj", queries, backward=True),
            self._attention("attention grad", backward=True),
            *self._rotary(),
            self._column("qkv", self._qkv_width, backward=True),
            self._memory("norm grad", 7 * self._hidden),
        )
        again: tuple[Op, ...] = ()
        if job.recompute == "full":
            again = self.forward.ops
        elif job.recompute == "selective":
            again = tuple(op for op in self.forward.ops if op.name == "attention")
        return Pass(tuple(Op(f"{op.name} again", op.time_us, op.tensor_us, op.context_us) for op in again) + ops)

    @cached_property
    def first(self) -> tuple[Pass, Pass]:
        """The embedding, forward and backward: rows that are looked up, and scattered over the tensor ranks."""
        moved = self.job.rows * self.job.model.hidden_size
        forward = [self._memory("embedding", 3 * moved)]
        if self.job.tensor > 1:
            forward.append(self._moved("embedding sum", "reduce_scatter", moved))
        return Pass(tuple(forward)), Pass((self._memory("embedding grad", 3 * moved),))

    @cached_property
    def last(self) -> tuple[Pass, Pass]:
        """The logits and the loss, forward and backward."""
        columns = self.job.vocabulary // self.job.tensor
        # Megatron's cross entropy is made of elementwise steps in fp32: widen, largest, subtract, exponential, sum,
        # divide move 38 bytes a logit; the gradient's copy, product and narrowing 22.
        logits = self.job.rows * columns / self.model.item_bytes
        loss = self._memory("loss", _LOSS_BYTES * logits)
        forward = (self._memory("norm", 4 * self._hidden), self._column("logits", columns), loss)
        loss_grad = self._memory("loss grad", _LOSS_GRAD_BYTES * logits)
        backward = (loss_grad, self._column("logits", columns, backward=True))
        return Pass(forward), Pass(backward)

    @property
    def boundary_bytes(self) -> float:
        """What one rank sends to the next pipeline stage for a micro-batch."""
        return self._hidden * self.model.item_bytes

    @property
    def _hidden(self) -> float:
        """Elements of an activation of a rank outside the linear layers."""
        split = self.job.tensor if self.job.sequence_parallel else 1
        return self.job.rows * self.job.model.hidden_size / split

    @property
    def _ffn(self) -> int:
        return self.job.model.ffn_hidden_size // self.job.tensor

    @property
    def _qkv_width(self) -> int:
        model = self.job.model
        return model.head_size * (model.num_attention_heads + 2 * model.num_query_groups) // self.job.tensor

    def _memory(self, name: str, elements: float) -> Op:
        return Op(name, self.model.memory_us(elements * self.model.item_bytes))

    def _rotary(self) -> Iterable[Op]:
        if self.job.model.rotary:
            yield self._memory("rotary", 2 * self.job.rows * self._qkv_width)

    def _moved(self, name: str, kind: str, elements: float) -> Op:
        assert kind in ("all_reduce", "reduce_scatter")
        time = self.model.collective_us(
            "all_reduce" if kind == "all_reduce" else "reduce_scatter",
            elements * self.model.item_bytes,
            self.tensor_link,
        )
        return Op(name, time, tensor_us=time)

    def _column(self, name: str, columns: int, *, backward: bool = False) -> Op:
        return self._linear(name, columns, self.job.model.hidden_size, column=True, backward=backward)

    def _row(self, name: str, width: int, *, backward: bool = False) -> Op:
        return self._linear(name, self.job.model.hidden_size, width, column=False, backward=backward)

    def _linear(self, name: str, n: int, k: int, *, column: bool, backward: bool) -> Op:
        job = self.job
        name = f"{name} grad" if backward else name
        if job.tensor > 1 and not job.sequence_parallel:
            return self._all_reduced(name, n, k, moved=column is backward, backward=backward)
        linear = Linear(self.model, self.tensor_link, job.tensor_choice, job.rows, n, k)
        played = _played(linear, column, backward)
        return Op(name, played.time_us, tensor_us=played.exposed_us)

    def _all_reduced(self, name: str, n: int, k: int, *, moved: bool, backward: bool) -> Op:
        """Plain tensor parallelism: the row's output and the column's input gradient are summed over all ranks."""
        rows, model = self.job.rows, self.model
        gemm = model.gemm_us(rows, k, n) if backward else model.gemm_us(rows, n, k)
        wgrad = model.gemm_us(n, k, rows) if backward else 0.0
        width = k if backward else n
        move = model.collective_us("all_reduce", rows * width * model.item_bytes, self.tensor_link) if moved else 0.0
        if not backward or self.job.tensor_choice.method == "serial":
            return Op(name, gemm + move + wgrad, tensor_us=move)
        # Beside the all-reduce wgrad runs slower; what is left of either comes after.
        speed = model.compute_rate("collective", 2 * self.tensor_link.collective_rate)
        beside = max(move, wgrad + min(move, wgrad / speed) * (1 - speed)) if moved else wgrad
        return Op(name, gemm + beside, tensor_us=max(0.0, move - wgrad / speed))

    def _attention(self, name: str, *, backward: bool) -> Op:
        """Causal attention; over context ranks as a ring, each step beside the next keys and values on their way."""
        job, model = self.job, self.job.model
        heads = model.num_attention_heads // job.tensor
        flops = 2.0 * job.micro_batch_size * heads * model.head_size * job.seq_length**2 / job.context
        # Two products forward and five backward, each 2 s^2 d, half of it behind the mask.
        whole = self.model.attention_us(flops * (2.5 if backward else 1.0), backward=backward)
        if job.context == 1:
            return Op(name, whole)
        keys = 2 * job.rows * model.head_size * model.num_query_groups / job.tensor * self.model.item_bytes
        link = self.model.link(job.context, job.tensor)
        move = self.model.message_us(keys * (2 if backward else 1), link)
        step = whole / job.context
        time = step + (job.context - 1) * max(step, move)
        return Op(name, time, context_us=time - whole)


@lru_cache(maxsize=8192)
def _played(linear: Linear, column: bool, backward: bool) -> Played:
    """Layers of one shape are played once."""
    if linear.choice.method == "auto":
        return _played(_fastest(linear, column), column, backward)
    if column:
        return linear.column_backward() if backward else linear.column_forward()
    return linear.row_backward() if backward else linear.row_forward()


@lru_cache(maxsize=8192)
def _fastest(linear: Linear, column: bool) -> Linear:
    return linear.fastest(column)
