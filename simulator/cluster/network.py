"""Links between replicas: transfers that share them fairly.

A transfer leaves through its source's port and enters through its target's, both of a fixed bandwidth in that
direction. At any moment every transfer has its max-min fair rate: the most loaded port is divided evenly among its
transfers, what these leave elsewhere among the others, and so on. Rates change only when a transfer begins or ends,
and only of those that share a port with it, directly or through others.

Transfers between the same two ports have one rate, so they are one lane, which counts the bytes that each of them has
been sent; each ends when that count reaches the mark at which it began plus its size.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable
from dataclasses import dataclass, field
from heapq import heappop, heappush
from math import ceil, inf

from policies import Ns
from simulator.clock.virtual_time import ARRIVAL, Moment, Nanoseconds

Port = tuple[str, Hashable]


@dataclass(slots=True, eq=False)
class Transfer:
    """Bytes on their way. number: in the order in which transfers began. mark: bytes of its lane when all are sent.
    under_way: not all of them are."""

    number: int
    lane: Lane
    mark: float
    done: Callable[[], None]
    cancelled: bool = False
    under_way: bool = True


@dataclass(slots=True, eq=False)
class Lane:
    """All transfers between two ports. bandwidths: of the ports, bytes per ns. sent: bytes of each transfer up to
    counted_ns, for one that was there from the beginning. ends_ns: when the next one ends, -1 where that has to be
    worked out. by_mark: a heap."""

    ports: tuple[Port, Port]
    bandwidths: tuple[float, float]
    counted_ns: Ns
    sent: float = 0.0
    rate: float = 0.0
    size: int = 0
    ends_ns: Ns = -1
    by_mark: list[tuple[float, int, Transfer]] = field(default_factory=list)

    def count(self, now_ns: Ns) -> None:
        """What has been sent since the rate was last set."""
        self.sent += self.rate * (now_ns - self.counted_ns)
        self.counted_ns = now_ns

    def first(self) -> Transfer:
        """The transfer that ends next."""
        while self.by_mark[0][2].cancelled:
            heappop(self.by_mark)
        return self.by_mark[0][2]

    def take_sent(self) -> list[Transfer]:
        """Those with less left than what one nanosecond carries: that is rounding only."""
        done = []
        while self.size and (first := self.first()).mark - self.sent < self.rate:
            heappop(self.by_mark)
            self.size -= 1
            first.under_way = False
            done.append(first)
        return done


class Fabric:
    """All transfers under way. latency_ns passes between the last byte's departure and its arrival."""

    def __init__(self, env: Nanoseconds, latency_ns: Ns) -> None:
        self.env = env
        self.latency_ns = latency_ns
        self._lanes: dict[tuple[Port, Port], Lane] = {}
        self._at_port: dict[Port, dict[Lane, None]] = {}
        self._begun = 0
        # (when, number of the entry, lane): the next end of each lane, and entries that a later one has replaced.
        self._ends: list[tuple[Ns, int, Lane]] = []
        self._entries = 0
        self._next: Moment | None = None
        self._next_ns: Ns = -1

    def send(
        self,
        source: Hashable,
        source_bytes_per_s: float,
        target: Hashable,
        target_bytes_per_s: float,
        size: int,
        done: Callable[[], None],
    ) -> Transfer:
        """Begin to send `size` bytes; done() is called when they have arrived."""
        ports = ("out", source), ("in", target)
        lane = self._lanes.get(ports)
        if lane is None:
            lane = Lane(ports, (source_bytes_per_s / 1e9, target_bytes_per_s / 1e9), self.env.now)
            self._lanes[ports] = lane
            for port in ports:
                self._at_port.setdefault(port, {})[lane] = None
        lane.count(self.env.now)
        lane.ends_ns = -1
        transfer = Transfer(self._begun, lane, lane.sent + size, done)
        self._begun += 1
        lane.size += 1
        heappush(lane.by_mark, (transfer.mark, transfer.number, transfer))
        self._share([lane])
        return transfer

    def cancel(self, transfer: Transfer) -> None:
        """Stop a transfer; its done() will not be called."""
        transfer.cancelled = True
        if transfer.under_way:
            transfer.under_way = False
            transfer.lane.size -= 1
            transfer.lane.ends_ns = -1
            self._share([transfer.lane])

    def _share(self, changed: Iterable[Lane]) -> None:
        """Set the rates of some lanes, and of all that share a port with them, and wait for the first to end."""
        lanes = self._connected(changed)
        left: dict[Port, float] = {}
        users: dict[Port, dict[Lane, None]] = {}
        transfers: dict[Port, int] = {}
        for lane in lanes:
            if not lane.size:
                self._close(lane)
                continue
            for port, bandwidth in zip(lane.ports, lane.bandwidths):
                left[port] = bandwidth
                users.setdefault(port, {})[lane] = None
                transfers[port] = transfers.get(port, 0) + lane.size
        while users:
            # Ports are looked at in the order in which they came into use: ties never depend on hashing.
            tightest, rate = next(iter(users)), inf
            for port in users:
                share = left[port] / transfers[port]
                if share < rate:
                    tightest, rate = port, share
            for lane in users.pop(tightest):
                self._set_rate(lane, rate)
                other = lane.ports[1] if lane.ports[0] == tightest else lane.ports[0]
                left[other] -= rate * lane.size
                transfers[other] -= lane.size
                del users[other][lane]
                if not users[other]:
                    del users[other]
        self._wait()

    def _connected(self, changed: Iterable[Lane]) -> list[Lane]:
        """Lanes that share a port with those that changed, directly or through others, these included."""
        found = dict.fromkeys(changed)
        ports: set[Port] = set()
        following = list(found)
        for lane in following:
            for port in lane.ports:
                if port not in ports:
                    ports.add(port)
                    for other in self._at_port.get(port, ()):
                        if other not in found:
                            found[other] = None
                            following.append(other)
        return following

    def _set_rate(self, lane: Lane, rate: float) -> None:
        if rate == lane.rate and lane.ends_ns >= 0:
            return
        lane.count(self.env.now)
        lane.rate = rate
        ends_ns = lane.counted_ns + ceil(max(0.0, lane.first().mark - lane.sent) / rate)
        if ends_ns != lane.ends_ns:
            lane.ends_ns = ends_ns
            self._entries += 1
            heappush(self._ends, (ends_ns, self._entries, lane))

    def _close(self, lane: Lane) -> None:
        """Nothing is left on a lane."""
        lane.ends_ns = -1
        if self._lanes.pop(lane.ports, None) is not None:
            for port in lane.ports:
                del self._at_port[port][lane]
                if not self._at_port[port]:
                    del self._at_port[port]

    def _wait(self) -> None:
        """Wait for the first end of any lane."""
        ends = self._ends
        while ends and ends[0][2].ends_ns != ends[0][0]:
            heappop(ends)
        if self._next is not None:
            if ends and ends[0][0] == self._next_ns:
                return
            self._next.void = True
            self._next = None
        if ends:
            self._next_ns = ends[0][0]
            self._next = Moment(self.env, self._next_ns - self.env.now, self._on_sent, ARRIVAL)

    def _on_sent(self, event: object) -> None:
        if event.void:  # type: ignore[attr-defined]
            return
        self._next = None
        now = self.env.now
        ended: dict[Lane, None] = {}
        sent: list[Transfer] = []
        while self._ends and self._ends[0][0] <= now:
            ends_ns, _, lane = heappop(self._ends)
            if lane.ends_ns == ends_ns:
                lane.count(now)
                lane.ends_ns = -1
                ended[lane] = None
                sent += lane.take_sent()
        self._share(ended)
        for transfer in sorted(sent, key=lambda transfer: transfer.number):
            Moment(self.env, self.latency_ns, lambda event, it=transfer: self._arrived(it), ARRIVAL)  # type: ignore[misc]

    @staticmethod
    def _arrived(transfer: Transfer) -> None:
        if not transfer.cancelled:
            transfer.done()
