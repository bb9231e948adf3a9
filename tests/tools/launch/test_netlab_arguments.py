"""Arguments that Netlab refuses before it makes a namespace."""

from __future__ import annotations

import pytest

from megatron_overlap.tools.launch.netlab import Netlab


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"hosts": 0}, "hosts: 0: "),
        ({"hosts": 251}, "hosts: 251: "),
        ({"hosts": 1, "ranks_per_host": 0}, "ranks_per_host: 0: "),
        ({"hosts": 1, "gbps": 0.0}, "gbps: 0.0: "),
        ({"hosts": 1, "gbps": 101.0}, "gbps: 101.0: "),
        ({"hosts": 1, "latency_ms": -1.0}, "latency_ms: -1.0: "),
        ({"hosts": 1, "burst_bytes": 1000}, "burst_bytes: 1000: "),
    ],
)
def test_arguments_out_of_range_are_refused(arguments: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError) as caught:
        Netlab(**arguments)  # type: ignore[arg-type]
    assert str(caught.value).startswith(message)


def test_an_unknown_host_is_refused() -> None:
    lab = Netlab(hosts=2)
    for call in (lab.address, lab.env, lab.host_name):
        with pytest.raises(ValueError, match="host: 2: the lab has 2"):
            call(2)
