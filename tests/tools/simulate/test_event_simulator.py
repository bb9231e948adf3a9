"""The event simulator: times computed by hand, and properties of all machines."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_overlap.schedules.heuristics import default_chunks
from megatron_overlap.schedules.plan import Pattern, part_weights
from megatron_overlap.tools.simulate.event_simulator import Stream, Transfer, run_streams
from megatron_overlap.tools.simulate.linear import SLICES, Linear, LinearOverlap, fastest
from tests.tools.simulate.machines import METHODS, machine

ROWS, WIDTH = 480, 100


def linear(choice: LinearOverlap, ranks: int, gemm_us: float, comm_us: float, **changes: float) -> Linear:
    """A layer with a GEMM of `gemm_us` and a collective of `comm_us`."""
    gbps = ROWS * WIDTH * 2 * (ranks - 1) / ranks / comm_us / 1e3
    tflops = 2.0 * ROWS * WIDTH * WIDTH / gemm_us / 1e6
    model = machine(gbps=gbps, tflops=tflops, **changes)
    return Linear(model, model.link(ranks), choice, ROWS, WIDTH, WIDTH)


@pytest.mark.parametrize("comm_us", [40.0, 75.0, 400.0])
@pytest.mark.parametrize("ranks", [2, 4, 8])
@pytest.mark.parametrize("pattern", ["ring", "direct"])
def test_tail_free_time_of_the_paper(pattern: Pattern, ranks: int, comm_us: float) -> None:
    """T = t_c + (N - 1) max(t_c, t_m), for both collectives."""
    layer = linear(LinearOverlap("p2p", pattern, 1, "all"), ranks, 100.0, comm_us)
    compute, move = 100.0 / ranks, comm_us / (ranks - 1)
    expected = compute + (ranks - 1) * max(compute, move)
    assert layer.column_forward().time_us == pytest.approx(expected)
    assert layer.row_forward().time_us == pytest.approx(expected)
    assert layer.row_forward().exposed_us == pytest.approx(expected - 100.0)


@pytest.mark.parametrize("parts", [2, 4])
def test_one_chunk_of_computation_is_exposed(parts: int) -> None:
    layer = linear(LinearOverlap("p2p", "direct", parts, "all"), 4, 100.0, 400.0)
    weights = part_weights(parts, "last")
    smallest = 100.0 / 4 * min(weights) / sum(weights)
    assert layer.column_forward().time_us == pytest.approx(400.0 + smallest)
    assert layer.row_forward().time_us == pytest.approx(400.0 + smallest)


@pytest.mark.parametrize("rows", [1024, 8192])
def test_p2p_uses_the_default_number_of_chunks(rows: int) -> None:
    """Even if another number is faster: here one message, because each message costs 100 us."""
    model = machine(launch_us=100.0, latency_us=100.0)
    for passes, collective in (("column_forward", "all_gather"), ("row_forward", "reduce_scatter")):
        usual = default_chunks(collective, 4, rows, 1024 * 2)  # type: ignore[arg-type]
        layers = {
            c: Linear(model, model.link(4), LinearOverlap("p2p", chunks_per_rank=c), rows, 1024, 1024)
            for c in (None, 1, usual)
        }
        times = {c: getattr(layer, passes)().time_us for c, layer in layers.items()}
        assert times[None] == times[usual] > times[1]


@pytest.mark.parametrize("column", [True, False])
@pytest.mark.parametrize(
    ("comm_us", "launch_us", "expected"), [(60, 0.1, "p2p"), (0.5, 0.1, "stock"), (60, 50, "stock")]
)
def test_auto_is_the_faster_of_both(comm_us: float, launch_us: float, expected: str, column: bool) -> None:
    """p2p is selected only if it gains more than the margin, including the cost of smaller GEMMs."""
    layer = linear(LinearOverlap("auto"), 4, 100.0, comm_us, launch_us=launch_us)
    assert fastest(layer, column).overlap.method == expected


def test_baselines_by_hand() -> None:
    def times(method: str) -> list[float]:
        layer = linear(LinearOverlap(method), 4, 100.0, 60.0)  # type: ignore[arg-type]
        passes = (layer.column_forward, layer.row_forward, layer.column_backward, layer.row_backward)
        return [one().time_us for one in passes]

    assert times("serial") == pytest.approx([160.0, 160.0, 320.0, 260.0])
    # Column: AG beside dgrad, RS beside wgrad, both shorter than the GEMM. Row: AG(dy) is exposed.
    assert times("stock") == pytest.approx([160.0, 160.0, 200.0, 260.0])
    # One slice is exposed.
    assert times("sliced")[:2] == pytest.approx([100.0 + 60.0 / SLICES] * 2)
    # Nothing is exposed where all GEMM pieces are as long as all messages or longer.
    assert times("p2p")[:2] == pytest.approx([100.0, 100.0])
    assert times("fused")[:2] == pytest.approx([100.0, 100.0])
    assert times("userbuffers")[:2] == pytest.approx([100.0, 100.0 + 60.0 / SLICES])


def test_a_saved_gathered_input_needs_no_second_gather() -> None:
    for method, expected in (("serial", 260.0), ("stock", 200.0)):
        choice = LinearOverlap(method, save_gathered=True)  # type: ignore[arg-type]
        simulated = linear(choice, 4, 100.0, 60.0).column_backward()
        assert simulated.time_us == pytest.approx(expected)
        assert simulated.sent_bytes == pytest.approx(ROWS * WIDTH * 2 * 3 / 4)


@pytest.mark.parametrize("method", METHODS)
def test_every_method_moves_the_same_bytes(method: str) -> None:
    layer = linear(LinearOverlap(method), 4, 100.0, 60.0)  # type: ignore[arg-type]
    one = ROWS * WIDTH * 2 * 3 / 4
    for simulated, passes in ((layer.column_forward(), 1), (layer.row_forward(), 1), (layer.row_backward(), 1)):
        assert simulated.sent_bytes == pytest.approx(passes * one)
    assert layer.column_backward().sent_bytes == pytest.approx(2 * one)


def stream(*sizes: float, work: tuple[tuple[float, tuple[int, ...]], ...] = ()) -> Stream:
    """Messages of these sizes that wait for no work, and work with the messages that it needs."""
    return Stream(messages=[Transfer(size) for size in sizes], work=list(work))


def test_a_rank_sends_one_message_at_a_time() -> None:
    """Over two streams the first ready message leaves first; latencies overlap transfers."""
    first, second = Stream(), Stream()
    for _ in range(2):
        first.send(Transfer(4000.0, latency_us=1.0))
    for time_us in (2.0, 30.0):
        second.compute(time_us)
        second.send(Transfer(1000.0, latency_us=1.0))
    model = machine()
    simulated = run_streams([first, second], model, model.link(2))
    assert simulated.arrived_us == (pytest.approx((5, 9)), pytest.approx((10, 34)))


@pytest.mark.parametrize(("compute_us", "slack_us"), [(10.0, 6.0), (4.0, 0.0), (1.0, 0.0)])
def test_slack_is_the_delay_that_causes_no_wait(compute_us: float, slack_us: float) -> None:
    """Two messages of 2 us: the first is needed after `compute_us`, the second 3 us later."""
    model = machine()
    one_by_one = stream(4000.0, 2000.0, work=((compute_us, ()), (1.0, (0,)), (2.0, ()), (1.0, (1,))))
    assert run_streams([one_by_one], model, model.link(2)).slack_us == pytest.approx(slack_us)
    both = stream(4e3, 2e3, work=((10.0, ()), (1.0, (0, 1))))
    assert run_streams([both], model, model.link(2)).slack_us == pytest.approx(4.0)
    nothing = stream(work=((compute_us, ()),))
    assert run_streams([nothing], model, model.link(2)).slack_us == 0.0


def test_slower_reduce_scatters() -> None:
    fast = linear(LinearOverlap("serial"), 4, 100.0, 60.0)
    slow = replace(fast, link=replace(fast.link, scatter_rate=fast.link.collective_rate / 2))
    assert slow.column_forward().time_us == pytest.approx(160.0)
    assert slow.row_forward().time_us == pytest.approx(220.0)
    assert slow.row_forward().sent_bytes == fast.row_forward().sent_bytes


def test_communication_slows_computation_down() -> None:
    model = machine(copy=0.5)
    simulated = run_streams([stream(4000.0, work=((10.0, ()),))], model, model.link(2))
    # 4 us beside the message do 2 us of work; the other 8 come after.
    assert simulated.time_us == pytest.approx(12.0)
    assert simulated.exposed_us == pytest.approx(0.0)


def test_additions_wait_for_their_messages_and_the_gemm_does_not() -> None:
    """Two ranks over a ring: a GEMM of half the rows, one beside the message, and a sum of 1 us after the message."""
    simulated = linear(LinearOverlap("p2p", "ring", 1), 2, 6.0, 5.0, memory_gbps=3 * ROWS * WIDTH / 1e3).row_forward()
    assert simulated.time_us == pytest.approx(3.0 + 5.0 + 1.0)
    assert simulated.exposed_us == pytest.approx(2.0)


def test_a_deadlock_is_refused() -> None:
    model = machine()
    with pytest.raises(ValueError, match="deadlock at work 0"):
        run_streams([stream(work=((1.0, (0,)),))], model, model.link(2))


ANY = st.builds(
    LinearOverlap,
    st.sampled_from(METHODS),
    st.sampled_from(["ring", "direct"]),
    st.sampled_from([1, 2, 3]),
    st.sampled_from(["edge", "all"]),
)


@settings(max_examples=40)
@given(ANY, st.sampled_from([2, 3, 4]), st.floats(1.0, 500.0), st.floats(1.0, 500.0), st.floats(1.01, 4.0))
def test_slower_links_never_help_and_bounds_hold(
    choice: LinearOverlap, ranks: int, gemm_us: float, comm_us: float, factor: float
) -> None:
    fast = linear(choice, ranks, gemm_us, comm_us)
    slow = linear(choice, ranks, gemm_us, comm_us * factor)
    for pass_name, gemms, moves in (
        ("column_forward", 1, 1),
        ("row_forward", 1, 1),
        ("column_backward", 2, 2),
        ("row_backward", 2, 1),
    ):
        simulated, slower = getattr(fast, pass_name)(), getattr(slow, pass_name)()
        tolerance = 1e-6 * (gemm_us + comm_us)
        assert slower.time_us >= simulated.time_us - tolerance
        assert simulated.time_us >= max(gemms * gemm_us, moves * comm_us) - tolerance
        assert simulated.time_us <= gemms * gemm_us + moves * comm_us + tolerance
        assert 0 <= simulated.exposed_us <= moves * comm_us + tolerance


@pytest.mark.parametrize(("compute_us", "expected"), [(100.0, 101.0), (8.0, 9.0), (5.0, 6.0), (3.0, 5.5), (0.5, 3.5)])
def test_a_message_waits_for_a_core_while_its_rank_computes(compute_us: float, expected: float) -> None:
    """Two sequential messages of 1 us; each waits up to 2.5 us for a core at the sender and at the receiver."""
    model = machine(busy_us=5.0)
    one = stream(1000.0, 1000.0, work=((compute_us, ()), (1.0, (0, 1))))
    assert run_streams([one], model, model.link(3)).time_us == pytest.approx(expected)


def test_forwarding_waits_for_a_core_at_the_receiver() -> None:
    """While the rank computes, twice: 2.5 us at the sender, 1 us of transfer, 2.5 us at the receiver."""
    forwarded = [Transfer(1000.0), Transfer(1000.0, after_message=0)]
    one = Stream(messages=forwarded, work=[(100.0, ())])
    model = machine(busy_us=5.0)
    simulated = run_streams([one], model, model.link(3))
    assert simulated.arrived_us[0] == pytest.approx((6.0, 12.0))
