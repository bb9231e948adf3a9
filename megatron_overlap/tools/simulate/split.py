"""Layers under sequence parallelism on two parts of a micro-batch, forward and backward (`overlap.tensor.split`).

The order of work and messages is that of `adapters/tensor_parallel/split_layer.py` on a device: the middle of a
step is after its first GEMM, and each wait in backward comes after all postponed weight gradients. The GEMMs of a part
have its rows only. `CostModel.gemm_us` gives their time: a wave of tiles that is not full costs as much as a full one.
On a device the messages of a part follow one another. Copy engines move an all-gather inside a node, and the own rows
at the same time; any other is a collective of NCCL. NCCL's reduce-scatter needs no sum afterwards.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache

from megatron_overlap.autotune.cost_model import CollectiveKind, CostModel, Mover
from megatron_overlap.autotune.search import MARGIN
from megatron_overlap.schedules.heuristics import MIN_COPY_BYTES, balanced_rows
from megatron_overlap.tools.simulate.event_simulator import Stream, Transfer, run_streams
from megatron_overlap.tools.simulate.job import Job, Split
from megatron_overlap.tools.simulate.layer import OVERLAPPED_CALLS, Layers
from megatron_overlap.tools.simulate.passes import Op, Pass


@dataclass(frozen=True, slots=True)
class _Step:
    """Times in us of the attention or the MLP of one part. Those of the weight gradients are zero in forward."""

    start: float  # sum of the received rows unless a collective adds them, residual and norm; before the all-gather
    column: float  # the first GEMM
    core: float  # what is between the GEMMs
    row: float  # the last GEMM
    column_wgrad: float = 0.0
    row_wgrad: float = 0.0


class _PartLayers(Layers):
    """The layers of one part: `job` has half of the sequences, or a part of each sequence."""

    def steps(self, *, keys_before: int, backward: bool) -> tuple[_Step, _Step]:
        """Attention and MLP. The queries of each sequence also read the `keys_before` keys of the other part."""
        passes = (False, True) if backward and self.job.recompute == "selective" else (backward,)
        attention = sum(op.time_us for each in passes for op in self._attention(backward=each))
        # Fused attention skips the masked scores: half of the own square is left.
        attention *= 1 + (1 if self.job.materializes_scores else 2) * keys_before / self.job.seq_length
        core = attention + self._rotary(backward=backward).time_us
        activation = self._activation(self._ffn, backward=backward).time_us
        attended = self._step(core, self._qkv_width, self._queries, backward)
        return attended, self._step(activation, self._fc1_width, self._ffn, backward)

    def _step(self, core_us: float, columns: int, width: int, backward: bool) -> _Step:
        rows, hidden, model, gemm_us = self.job.rows, self.job.model.hidden_size, self.model, self.model.gemm_us
        # One sum reads the received rows and the own rows, and writes the result.
        elements = self.job.hidden_elements
        added = 0.0 if model.on_device else model.memory_us((self.job.tensor + 1) * elements * model.item_bytes)
        start = added + self._norm(backward=backward).time_us + self._elementwise("add", elements).time_us
        core_us += model.calls_us(self._layer_calls(backward=backward) / 2 + 2 * OVERLAPPED_CALLS)
        if not backward:
            return _Step(start, gemm_us(rows, columns, hidden), core_us, gemm_us(rows, hidden, width))
        wgrads = gemm_us(columns, hidden, rows), gemm_us(hidden, width, rows)
        return _Step(start, gemm_us(rows, hidden, columns), core_us, gemm_us(rows, width, hidden), *wgrads)

    def first_rows(self) -> int:
        """Rows of all ranks in the first part of each sequence."""
        job, hidden = self.job, self.job.model.hidden_size
        gemms = (self._qkv_width, hidden), (hidden, self._queries), (self._fc1_width, hidden), (hidden, self._ffn)
        processors, ranks = self.model.profile.device.gemm.processors, job.tensor
        known = processors if processors > 1 else None
        return ranks * balanced_rows(job.seq_length // ranks, ranks, job.micro_batch_size, gemms, self._queries, known)

    @property
    def own_bytes(self) -> float:
        """Bytes of an activation of the part on one rank. The rank sends them to each peer in one collective."""
        return self.job.hidden_elements * self.model.item_bytes

    @property
    def gathers_by_copies(self) -> bool:
        """See `PartGathers`."""
        overlap = self.job.tensor_overlap
        engines = self.model.mover(self.tensor_link) == "copy"
        return engines and overlap.copies and self.own_bytes >= MIN_COPY_BYTES

    def fixed_us(self, kind: CollectiveKind) -> float:
        """Time of one all-gather or reduce-scatter on a device, without the transfer of its bytes."""
        link = self.tensor_link
        if kind == "all_gather" and self.gathers_by_copies:
            others = self.job.tensor - 1
            return self.model.queued_us(link, "copy", 2 * others, others)
        sent_us = (self.job.tensor - 1) * self.own_bytes / link.copy_rate
        return self.model.collective_us(kind, self.job.tensor * self.own_bytes, link) - sent_us


class _Schedule:
    """Builds the program of both parts, whose `layers` and `steps` are in the order of their computation."""

    def __init__(self, layers: Sequence[_PartLayers], steps: Sequence[Sequence[_Step]]) -> None:
        self._layers, self._steps = layers, steps
        # See `GatherScatterMessages.gather_next`.
        self._collectives = layers[0].model.on_device and not all(part.gathers_by_copies for part in layers)
        self._sequence = [(part, index) for index in range(len(steps[0])) for part in range(2)]
        self.parts = [Stream() for _ in layers]
        self.order: list[tuple[int, int]] = []

    def _compute(self, part: int, time_us: float, *needs: int) -> None:
        self.order.append((part, self.parts[part].compute(time_us, *needs)))

    def _collective(self, part: int, kind: CollectiveKind) -> int:
        """A collective of a part, modelled as one message that follows the work of the part so far."""
        layers = self._layers[part]
        num_bytes = (layers.job.tensor - 1) * layers.own_bytes
        if not layers.model.on_device:
            return self.parts[part].send(Transfer(num_bytes))
        mover: Mover = "copy" if kind == "all_gather" and layers.gathers_by_copies else "message"
        return self.parts[part].send(Transfer(num_bytes, latency_us=0.0, queued_us=layers.fixed_us(kind), mover=mover))

    def forward(self) -> None:
        """Each step starts the next one after its first GEMM."""
        gathers, scatters = [0, 0], [-1, -1]

        def start(part: int, index: int) -> None:
            self._compute(part, self._steps[part][index].start, *([scatters[part]] if index else []))
            gathers[part] = self._collective(part, "all_gather")

        start(0, 0)
        for position, (part, index) in enumerate(self._sequence):
            step = self._steps[part][index]
            self._compute(part, step.column, gathers[part])
            if position < len(self._sequence) - 1:
                start(*self._sequence[position + 1])
            self._compute(part, step.core)
            self._compute(part, step.row)
            scatters[part] = self._collective(part, "reduce_scatter")
        for part in range(2):
            self._compute(part, 0.0, scatters[part])

    def backward(self) -> None:
        """Each step starts the next one before its last GEMM. Each wait runs the postponed weight gradients."""
        of_output, of_input, scatters = [0, 0], [0, 0], [-1, -1]
        postponed: list[tuple[int, float, int]] = []

        def wgrads() -> None:
            for part, time_us, needed in postponed:
                self._compute(part, time_us, needed)
            postponed.clear()

        def start(part: int, index: int) -> None:
            wgrads()
            self._compute(part, self._steps[part][index].start if index else 0.0, *([scatters[part]] if index else []))
            of_output[part] = self._collective(part, "all_gather")
            if not self._collectives:
                of_input[part] = self._collective(part, "all_gather")

        start(0, 0)
        for position, (part, index) in enumerate(self._sequence):
            step = self._steps[part][index]
            wgrads()
            if self._collectives:
                self._compute(part, 0.0, of_output[part])
                of_input[part] = self._collective(part, "all_gather")
            self._compute(part, step.row, of_output[part])
            postponed.append((part, step.row_wgrad, of_output[part]))
            self._compute(part, step.core)
            gathered = of_input[part]
            if position < len(self._sequence) - 1:
                start(*self._sequence[position + 1])
            self._compute(part, step.column)
            scatters[part] = self._collective(part, "reduce_scatter")
            postponed.append((part, step.column_wgrad, gathered))
        wgrads()
        for part in range(2):
            self._compute(part, self._steps[part][-1].start, scatters[part])


def layer_passes(job: Job, model: CostModel) -> tuple[Pass, Pass]:
    """Forward and backward of one layer: the mean of those that hand off their output if they are split."""
    layers = Layers(job, model)
    separate = layers.forward, layers.backward
    split = job.used_split
    if split == "none":
        return separate
    passes = _split_passes(job, model, split)
    split_us, separate_us = (sum(one.time_us for one in each) for each in (passes, separate))
    return separate if job.split == "auto" and split_us >= (1 - MARGIN) * separate_us else passes


@lru_cache(maxsize=1024)
def _split_passes(job: Job, model: CostModel, split: Split) -> tuple[Pass, Pass]:
    whole = _PartLayers(job, model)
    if split == "sequence":
        first, keys_before = whole.first_rows(), (0, whole.first_rows())
        jobs = [replace(job, split="none", seq_length=length) for length in (first, job.seq_length - first)]
    else:
        keys_before = 0, 0
        jobs = [replace(job, split="none", micro_batch_size=job.micro_batch_size // 2)] * 2
    parts = [_PartLayers(each, model) for each in jobs]
    # No output is handed off from a layer that is recomputed alone.
    count = 1 if job.recompute == "full" else job.layers_per_chunk

    def op(backward: bool) -> Op:
        both = zip(parts, keys_before, strict=True)
        steps = [part.steps(keys_before=before, backward=backward) for part, before in both]
        if backward:
            steps = [(mlp, attention) for attention, mlp in reversed(steps)]
        layers = parts[::-1] if backward else parts
        schedule = _Schedule(layers, [[*both] * count for both in steps])
        (schedule.backward if backward else schedule.forward)()
        simulated = run_streams(schedule.parts, model, whole.tensor_link, order=schedule.order)
        gradients_us = whole.accumulated(job.layer_parameters() / job.tensor).time_us if backward else 0.0
        copies = all(part.gathers_by_copies for part in parts)
        num_gathers = sum(message.mover == "copy" for part in schedule.parts for message in part.messages)
        # Each is one batch, and takes the host as long as a message and its further copies.
        further_us = (job.tensor - 2) * whole.tensor_link.further_us if copies else 0.0
        enqueue_us = (simulated.num_messages * model.enqueue_us + num_gathers * further_us) / count
        return Op(
            f"{split} parts{' grad' if backward else ''}",
            simulated.time_us / count + gradients_us,
            simulated.exposed_us / count,
            sync="before",
            slack_us=simulated.slack_us,
            enqueue_us=enqueue_us,
        )

    # The input is divided into parts before `count` layers, and the output is joined after them.
    num_bytes = job.hidden_elements * model.item_bytes
    # `split_rows` moves most rows to other ranks.
    exchange_us = model.all_to_all_us(num_bytes, job.tensor) if split == "sequence" else 0.0
    copy_us = model.memory_us(2 * num_bytes)
    forward, moved = op(False), Op("parts", 2 * (copy_us + exchange_us) / count, 2 * exchange_us / count)
    again = [replace(each, name=f"{each.name} again") for each in (moved, forward)] if job.recompute == "full" else []
    return whole.skewed(moved, forward), whole.skewed(*again, moved, op(True))
