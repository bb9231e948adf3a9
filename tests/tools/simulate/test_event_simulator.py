"""Schedules on machines whose times can be worked out by hand, and laws that hold on all of them."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_overlap.schedules import Chunk, Message, Plan, Work
from megatron_overlap.schedules.heuristics import default_chunks
from megatron_overlap.schedules.layout import part_weights
from megatron_overlap.schedules.plan import Pattern, Split
from megatron_overlap.tools.simulate.event_simulator import play
from megatron_overlap.tools.simulate.linear import METHODS, SLICES, Choice, Linear
from megatron_overlap.tools.simulate.program import Program, Stream, in_order
from tests.tools.simulate.machines import machine

ROWS, WIDTH = 480, 100
CHUNK = Chunk(0, 0)


def linear(choice: Choice, ranks: int, gemm_us: float, comm_us: float, **changes: float) -> Linear:
    """A layer whose GEMM takes `gemm_us` in one piece and whose collective takes `comm_us`."""
    gbps = ROWS * WIDTH * 2 * (ranks - 1) / ranks / comm_us / 1e3
    tflops = 2.0 * ROWS * WIDTH * WIDTH / gemm_us / 1e6
    model = machine(gbps=gbps, tflops=tflops, **changes)
    return Linear(model, model.link(ranks), choice, ROWS, WIDTH, WIDTH)


@pytest.mark.parametrize("comm_us", [40.0, 75.0, 400.0])
@pytest.mark.parametrize("ranks", [2, 4, 8])
@pytest.mark.parametrize("pattern", ["ring", "direct"])
def test_tail_free_time_of_the_paper(pattern: Pattern, ranks: int, comm_us: float) -> None:
    """T = t_c + (N - 1) max(t_c, t_m), for both collectives."""
    layer = linear(Choice("p2p", pattern, 1, "all"), ranks, 100.0, comm_us)
    compute, move = 100.0 / ranks, comm_us / (ranks - 1)
    expected = compute + (ranks - 1) * max(compute, move)
    assert layer.column_forward().time_us == pytest.approx(expected)
    assert layer.row_forward().time_us == pytest.approx(expected)
    assert layer.row_forward().exposed_us == pytest.approx(expected - 100.0)


@pytest.mark.parametrize("parts", [2, 4])
def test_what_is_left_over_communication_is_one_sub_slice(parts: int) -> None:
    layer = linear(Choice("p2p", "direct", parts, "all"), 4, 100.0, 400.0)
    weights = part_weights(parts, "last")
    smallest = 100.0 / 4 * min(weights) / sum(weights)
    assert layer.column_forward().time_us == pytest.approx(400.0 + smallest)
    assert layer.row_forward().time_us == pytest.approx(400.0 + smallest)


@pytest.mark.parametrize("rows", [1024, 8192])
def test_p2p_is_cut_as_the_plugin_cuts_it_unless_told(rows: int) -> None:
    """Also where other cuts would be faster: here one message, as each costs 100 us."""
    model = machine(launch_us=100.0, latency_us=100.0)
    for passes, collective in (("column_forward", "all_gather"), ("row_forward", "reduce_scatter")):
        usual = default_chunks(collective, 4, rows, 1024 * 2)  # type: ignore[arg-type]
        layers = {
            c: Linear(model, model.link(4), Choice("p2p", chunks_per_rank=c), rows, 1024, 1024)
            for c in (None, 1, usual)
        }
        times = {c: getattr(layer, passes)().time_us for c, layer in layers.items()}
        assert times[None] == times[usual] > times[1]


@pytest.mark.parametrize("column", [True, False])
@pytest.mark.parametrize(
    ("comm_us", "launch_us", "expected"), [(60, 0.1, "p2p"), (0.5, 0.1, "megatron"), (60, 50, "megatron")]
)
def test_auto_is_the_faster_of_both(comm_us: float, launch_us: float, expected: str, column: bool) -> None:
    """p2p where there is something to hide; not where it is within the margin, or cut GEMMs cost more than that."""
    layer = linear(Choice("auto"), 4, 100.0, comm_us, launch_us=launch_us)
    assert layer.fastest(column).choice.method == expected


def test_baselines_by_hand() -> None:
    def times(method: str) -> list[float]:
        layer = linear(Choice(method), 4, 100.0, 60.0)  # type: ignore[arg-type]
        passes = (layer.column_forward, layer.row_forward, layer.column_backward, layer.row_backward)
        return [one().time_us for one in passes]

    assert times("serial") == pytest.approx([160.0, 160.0, 320.0, 260.0])
    # Column: AG beside dgrad, RS beside wgrad, both shorter than the GEMM. Row: AG(dy) is exposed.
    assert times("megatron") == pytest.approx([160.0, 160.0, 200.0, 260.0])
    # One slice is exposed.
    assert times("sliced")[:2] == pytest.approx([100.0 + 60.0 / SLICES] * 2)
    # Nothing is exposed where all GEMM pieces are as long as all messages or longer.
    assert times("p2p")[:2] == pytest.approx([100.0, 100.0])
    assert times("fused")[:2] == pytest.approx([100.0, 100.0])
    assert times("userbuffers")[:2] == pytest.approx([100.0, 100.0 + 60.0 / SLICES])


def test_a_gathered_input_that_is_kept_is_not_gathered_again() -> None:
    for method, expected in (("serial", 260.0), ("megatron", 200.0)):
        choice = Choice(method, save_gathered=True)  # type: ignore[arg-type]
        played = linear(choice, 4, 100.0, 60.0).column_backward()
        assert played.time_us == pytest.approx(expected)
        assert played.sent_bytes[0] == pytest.approx(ROWS * WIDTH * 2 * 3 / 4)


@pytest.mark.parametrize("split", ["edge", "all"])
@pytest.mark.parametrize("parts", [1, 2, 4])
@pytest.mark.parametrize("ranks", [2, 4, 8])
@pytest.mark.parametrize("pattern", ["ring", "direct", "serial"])
def test_one_rank_for_all_equals_all_ranks(pattern: Pattern, ranks: int, parts: int, split: Split) -> None:
    layer = linear(Choice("p2p", pattern, parts, split), ranks, 100.0, 130.0, latency_us=2.0, launch_us=1.0, copy=0.2)
    for collective, folded in (("all_gather", layer.column_forward()), ("reduce_scatter", layer.row_forward())):
        unfolded = layer.unfolded(collective)  # type: ignore[arg-type]
        assert folded.time_us == pytest.approx(unfolded.time_us)
        assert folded.compute_us == pytest.approx(unfolded.compute_us)
        assert unfolded.sent_bytes == pytest.approx([ROWS * WIDTH * 2 * (ranks - 1) / ranks] * ranks)
        assert unfolded.received_bytes == pytest.approx(unfolded.sent_bytes)
        assert folded.sent_bytes[0] == pytest.approx(unfolded.sent_bytes[0])


@pytest.mark.parametrize("method", METHODS)
def test_every_method_moves_the_same_bytes(method: str) -> None:
    layer = linear(Choice(method), 4, 100.0, 60.0)  # type: ignore[arg-type]
    one = ROWS * WIDTH * 2 * 3 / 4
    for played, passes in ((layer.column_forward(), 1), (layer.row_forward(), 1), (layer.row_backward(), 1)):
        assert played.sent_bytes[0] == pytest.approx(passes * one)
    assert layer.column_backward().sent_bytes[0] == pytest.approx(2 * one)


def plan(rank: int, exchanges: tuple[Message, ...], work: tuple[Work, ...], ranks: int = 3) -> Plan:
    return Plan("all_gather", "direct", ranks, rank, 1, exchanges, work)


def test_two_senders_share_the_port_of_one_receiver() -> None:
    model = machine()
    sends = tuple(Message(CHUNK, 2, CHUNK, 0) for _ in range(1))
    programs = [in_order(Stream(plan(rank, sends, ()), (), (), (1000.0,))) for rank in (0, 1)]
    programs.append(in_order(Stream(plan(2, (), ()), (), (), ())))
    assert play(programs, model, model.link(3)).time_us == pytest.approx(2.0)
    # To different receivers each has its own.
    apart = [
        in_order(Stream(plan(rank, (Message(CHUNK, to, CHUNK, 0),), ()), (), (), (1000.0,)))
        for rank, to in ((0, 1), (1, 2))
    ]
    assert play([*apart, programs[2]], model, model.link(3)).time_us == pytest.approx(1.0)


def test_max_min_leaves_what_one_cannot_use_to_the_others() -> None:
    """Ranks 0 and 1 send to rank 2, which halves both; rank 3 sends to rank 0 at the full rate."""
    model = machine()
    to = {0: 2, 1: 2, 3: 0}
    programs = []
    for rank in range(4):
        sends = (Message(CHUNK, to[rank], CHUNK, 0),) if rank in to else ()
        programs.append(in_order(Stream(plan(rank, sends, (), 4), (), (), (1000.0,) * len(sends))))
    played = play(programs, model, model.link(4))
    ends = {span.rank: span.stop_us for span in played.spans}
    assert ends == pytest.approx({0: 2.0, 1: 2.0, 3: 1.0})


def test_max_min_counts_what_the_slow_ones_take() -> None:
    """Rank 0 sends to 1, 2 and 3, a third of its port each; rank 4 gets the other two thirds of the way into rank 2."""
    model = machine()
    apart = tuple(Stream(plan(0, (Message(CHUNK, to, CHUNK, 0),), (), 5), (), (), (1000.0,)) for to in (1, 2, 3))
    idle = in_order(*[Stream(plan(1, (), (), 5), (), (), ())] * 3)
    last = in_order(Stream(plan(4, (Message(CHUNK, 2, CHUNK, 4),), (), 5), (), (), (1000.0,)))
    played = play([in_order(*apart), idle, idle, idle, last], model, model.link(5), kind="collective")
    assert played.time_us == pytest.approx(3.0)
    assert [span.stop_us for span in played.spans if span.rank == 4] == pytest.approx([1.5])


def test_messages_of_a_rank_leave_one_after_the_other() -> None:
    """Of two streams too, the one that was ready first; what each costs beside its bytes passes meanwhile."""
    first = Stream(plan(0, (Message(CHUNK, 0, CHUNK, 0),) * 2, (), 2), (), (), (4000.0, 4000.0), latency_us=1.0)
    work = (Work((CHUNK,)), Work((CHUNK,)))
    later = (Message(CHUNK, 0, CHUNK, 0, after_work=1), Message(CHUNK, 0, CHUNK, 0, after_work=2))
    second = Stream(plan(0, later, work, 2), (2.0, 30.0), (0.0, 0.0), (1000.0, 1000.0), latency_us=1.0)
    model = machine()
    played = play([in_order(first, second)], model, model.link(2), fold=True)
    ends = {span.name: span.stop_us for span in played.spans if span.kind == "message"}
    assert ends == pytest.approx({"exchange 0.0": 5, "exchange 0.1": 9, "exchange 1.0": 10, "exchange 1.1": 34})
    beside = play([in_order(first, second)], model, model.link(2), fold=True, kind="collective")
    assert {span.name: span.stop_us for span in beside.spans}["exchange 1.0"] == pytest.approx(5)


@pytest.mark.parametrize(("compute_us", "slack_us"), [(10.0, 6.0), (4.0, 0.0), (1.0, 0.0)])
def test_slack_is_what_messages_could_be_later_without_a_wait(compute_us: float, slack_us: float) -> None:
    """Of two messages of 2 us the first is needed after so much computation, the second 3 us later."""
    model = machine()
    work = (Work((CHUNK,)), Work((CHUNK,), needs=(0,)), Work((CHUNK,), adds=(1,)))
    stream = Stream(
        plan(0, (Message(CHUNK, 0, CHUNK, 0),) * 2, work, 2), (compute_us, 1.0, 2.0), (0.0, 0.0, 1.0), (4000.0, 2000.0)
    )
    assert play([in_order(stream)], model, model.link(2), fold=True).slack_us == pytest.approx(slack_us)
    both = Stream(
        replace(stream.plan, work=(work[0], Work((CHUNK,), needs=(0, 1)))), (10.0, 1.0), (0.0, 0.0), (4e3, 2e3)
    )
    assert play([in_order(both)], model, model.link(2), fold=True).slack_us == pytest.approx(4.0)
    nothing = Stream(plan(0, (), (Work((CHUNK,)),), 2), (compute_us,), (0.0,), ())
    assert play([in_order(nothing)], model, model.link(2), fold=True).slack_us == 0.0


def test_what_is_forwarded_has_to_be_there() -> None:
    model = machine()
    late = Stream(plan(0, (Message(CHUNK, 1, CHUNK, 2, after_work=1),), (Work((CHUNK,)),)), (10.0,), (0.0,), (1000.0,))
    on = Stream(plan(1, (Message(CHUNK, 2, CHUNK, 0, after_message=0),), ()), (), (), (1000.0,))
    end = Stream(plan(2, (), ()), (), (), ())
    assert play([in_order(late), in_order(on), in_order(end)], model, model.link(3)).time_us == pytest.approx(12.0)


def test_reduce_scatters_that_are_slower_than_all_gathers() -> None:
    fast = linear(Choice("serial"), 4, 100.0, 60.0)
    slow = replace(fast, link=replace(fast.link, scatter_rate=fast.link.collective_rate / 2))
    assert slow.column_forward().time_us == pytest.approx(160.0)
    assert slow.row_forward().time_us == pytest.approx(220.0)
    assert slow.row_forward().sent_bytes == fast.row_forward().sent_bytes


def test_communication_slows_computation_down_while_it_lasts() -> None:
    model = machine(copy=0.5)
    sent = (Message(CHUNK, 0, CHUNK, 0),)
    stream = Stream(plan(0, sent, (Work((CHUNK,)),), 2), (10.0,), (0.0,), (4000.0,))
    played = play([in_order(stream)], model, model.link(2), fold=True)
    # 4 us beside the message do 2 us of work; the other 8 come after.
    assert played.time_us == pytest.approx(12.0)
    assert played.exposed_us == pytest.approx(0.0)
    assert played.lost_us == pytest.approx(2.0)


def test_additions_wait_for_what_they_add_and_the_gemm_does_not() -> None:
    model = machine()
    sent = (Message(CHUNK, 0, CHUNK, 0),)
    stream = Stream(plan(0, sent, (Work((CHUNK,), adds=(0,)),), 2), (3.0,), (1.0,), (5000.0,))
    played = play([in_order(stream)], model, model.link(2), fold=True)
    assert played.time_us == pytest.approx(6.0)
    assert played.exposed_us == pytest.approx(2.0)


def test_programs_that_wait_for_ever_are_refused() -> None:
    model = machine()
    stuck = Stream(plan(0, (), (Work((CHUNK,), needs=(0,)),), 2), (1.0,), (0.0,), ())
    with pytest.raises(ValueError, match="rank 0 waits for ever at work 0"):
        play([Program((stuck,), ((0, 0),))], model, model.link(2), fold=True)


ANY = st.builds(
    Choice,
    st.sampled_from(METHODS),
    st.sampled_from(["ring", "direct"]),
    st.sampled_from([1, 2, 3]),
    st.sampled_from(["edge", "all"]),
)


@settings(max_examples=40, deadline=None)
@given(ANY, st.sampled_from([2, 3, 4]), st.floats(1.0, 500.0), st.floats(1.0, 500.0), st.floats(1.01, 4.0))
def test_slower_links_never_help_and_nothing_beats_the_roof(
    choice: Choice, ranks: int, gemm_us: float, comm_us: float, factor: float
) -> None:
    fast = linear(choice, ranks, gemm_us, comm_us)
    slow = linear(choice, ranks, gemm_us, comm_us * factor)
    for pass_name, gemms, moves in (
        ("column_forward", 1, 1),
        ("row_forward", 1, 1),
        ("column_backward", 2, 2),
        ("row_backward", 2, 1),
    ):
        played, slower = getattr(fast, pass_name)(), getattr(slow, pass_name)()
        tolerance = 1e-6 * (gemm_us + comm_us)
        assert slower.time_us >= played.time_us - tolerance
        assert played.time_us >= max(gemms * gemm_us, moves * comm_us) - tolerance
        assert played.time_us <= gemms * gemm_us + moves * comm_us + tolerance
        assert 0 <= played.exposed_us <= moves * comm_us + tolerance


@pytest.mark.parametrize(("compute_us", "expected"), [(100.0, 101.0), (8.0, 9.0), (5.0, 6.0), (3.0, 5.5), (0.5, 3.5)])
def test_a_message_waits_for_a_core_until_its_rank_waits_for_it(compute_us: float, expected: float) -> None:
    """Two messages of 1 us, one after the other; each waits for up to 2.5 us to leave, and as long to be noticed."""
    model = machine(busy_us=5.0)
    moves = (Message(CHUNK, 0, CHUNK, 0), Message(CHUNK, 0, CHUNK, 0))
    work = (Work((CHUNK,)), Work((CHUNK,), needs=(0, 1)))
    program = in_order(Stream(plan(0, moves, work), (compute_us, 1.0), (0.0, 0.0), (1000.0, 1000.0)))
    assert play([program], model, model.link(3), fold=True).time_us == pytest.approx(expected)


def test_what_is_forwarded_leaves_when_its_arrival_was_noticed() -> None:
    """While the rank computes: 2.5 us to leave, 1 on the way, 2.5 to be noticed, twice."""
    moves = (Message(CHUNK, 0, CHUNK, 0), Message(CHUNK, 0, CHUNK, 0, after_message=0))
    program = in_order(Stream(plan(0, moves, (Work((CHUNK,)),)), (100.0,), (0.0,), (1000.0, 1000.0)))
    model = machine(busy_us=5.0)
    played = play([program], model, model.link(3), fold=True)
    assert [span.stop_us for span in played.spans if span.kind == "message"] == pytest.approx([6.0, 12.0])
