"""Transfers that share links, against shares that are worked out anew for every transfer at every event."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from simulator.clock.virtual_time import Moment, VirtualTime
from simulator.cluster.network import Fabric

PORTS = {("out", 0): 3.0, ("out", 1): 7.0, ("out", 2): 1.0, ("in", 0): 2.0, ("in", 1): 5.0, ("in", 2): 0.5}
"""Bytes per ns."""

Send = tuple[int, int, int, int, int]
"""(when, source, target, bytes, ns until it is cancelled or 0)."""


def fair_rates(open_transfers: dict[int, tuple[tuple[str, int], tuple[str, int]]]) -> dict[int, float]:
    """Max-min fair: the most loaded port divides itself evenly, the others what is left."""
    rates: dict[int, float] = {}
    while len(rates) < len(open_transfers):
        free = {port: PORTS[port] - sum(rates[t] for t in rates if port in open_transfers[t]) for port in PORTS}
        users = {port: [t for t in open_transfers if t not in rates and port in open_transfers[t]] for port in PORTS}
        tightest = min((port for port in PORTS if users[port]), key=lambda port: free[port] / len(users[port]))
        share = free[tightest] / len(users[tightest])
        rates.update(dict.fromkeys(users[tightest], share))
    return rates


def ends_of(sends: list[Send]) -> dict[int, float]:
    """When each transfer that is not cancelled ends, ns, by stepping from event to event."""
    changes = sorted({when for when, *_ in sends} | {when + until for when, *_, until in sends if until})
    left: dict[int, float] = {}
    ends: dict[int, float] = {}
    now = 0.0
    while changes or left:
        rates = fair_rates({t: (("out", sends[t][1]), ("in", sends[t][2])) for t in left})
        following = min([now + left[t] / rates[t] for t in left] + [float(change) for change in changes[:1]])
        for t in left:
            left[t] -= rates[t] * (following - now)
        now = following
        for t in [t for t in left if left[t] <= 1e-6 * rates[t]]:
            del left[t]
            ends[t] = now
        if changes and changes[0] == now:
            changes.pop(0)
            for t, (when, _, _, size, until) in enumerate(sends):
                if when == now:
                    left[t] = float(size)
                if until and when + until == now:
                    left.pop(t, None)
    return ends


@given(
    st.lists(
        st.tuples(
            st.integers(0, 400), st.integers(0, 2), st.integers(0, 2), st.integers(1, 900), st.sampled_from([0, 0, 150])
        ),
        min_size=1,
        max_size=12,
    )
)
@settings(max_examples=80, deadline=None, derandomize=True)
def test_every_transfer_ends_when_its_fair_share_has_carried_it(sends: list[Send]) -> None:
    """Within a nanosecond for each end before it: a clock of whole nanoseconds rounds up."""
    env = VirtualTime()
    fabric = Fabric(env, latency_ns=10)
    found: dict[int, int] = {}

    def begin(number: int) -> None:
        _, source, target, size, until = sends[number]
        bandwidths = PORTS["out", source] * 1e9, PORTS["in", target] * 1e9
        transfer = fabric.send(
            source, bandwidths[0], target, bandwidths[1], size, lambda: found.update({number: int(env.now) - 10})
        )
        if until:
            Moment(env, until, lambda event: fabric.cancel(transfer))

    for number, (when, *_) in enumerate(sends):
        Moment(env, when, lambda event, number=number: begin(number))  # type: ignore[misc]
    env.run()
    expected = ends_of(sends)
    # One that ends at the moment of its cancelling, or on the wire after it, may be counted on either side.
    doubtful = {
        t for t, (when, *_, until) in enumerate(sends) if until and abs(expected.get(t, 1e9) - when - until) < 30
    }
    for number in set(range(len(sends))) - doubtful:
        assert (number in found) == (number in expected)
        if number in found:
            assert found[number] == pytest.approx(expected[number], abs=len(sends) + 1)
    assert not fabric._lanes
    assert not fabric._at_port
