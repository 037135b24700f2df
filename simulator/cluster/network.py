"""Links between replicas: transfers that share them fairly.

A transfer leaves through its source's port and enters through its target's, both of a fixed bandwidth in that
direction. At any moment every transfer has its max-min fair rate: the most loaded port is divided evenly among its
transfers, what these leave elsewhere among the others, and so on. Rates change only when a transfer begins or ends.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import dataclass
from math import ceil

from policies import Ns
from simulator.clock.virtual_time import ARRIVAL, Moment, Nanoseconds


@dataclass(slots=True, eq=False)
class Transfer:
    """Bytes on their way. ports: (port, its bytes per ns) of source and target."""

    ports: tuple[tuple[Hashable, float], tuple[Hashable, float]]
    left: float
    done: Callable[[], None]
    rate: float = 0.0
    cancelled: bool = False


class Fabric:
    """All transfers under way. latency_ns passes between the last byte's departure and its arrival."""

    def __init__(self, env: Nanoseconds, latency_ns: Ns) -> None:
        self.env = env
        self.latency_ns = latency_ns
        self._transfers: list[Transfer] = []
        self._counted_ns: Ns = 0
        self._next: Moment | None = None

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
        ports = (("out", source), source_bytes_per_s / 1e9), (("in", target), target_bytes_per_s / 1e9)
        transfer = Transfer(ports, float(size), done)
        self._count()
        self._transfers.append(transfer)
        self._share()
        return transfer

    def cancel(self, transfer: Transfer) -> None:
        """Stop a transfer; its done() will not be called."""
        transfer.cancelled = True
        if transfer in self._transfers:
            self._count()
            self._transfers.remove(transfer)
            self._share()

    def _count(self) -> None:
        """What has been sent since the rates were last set."""
        now = self.env.now
        for transfer in self._transfers:
            transfer.left -= transfer.rate * (now - self._counted_ns)
        self._counted_ns = now

    def _share(self) -> None:
        """Set every transfer's rate, and wait for the first to end."""
        left: dict[Hashable, float] = {}
        users: dict[Hashable, list[Transfer]] = {}
        for transfer in self._transfers:
            for port, bandwidth in transfer.ports:
                left[port] = bandwidth
                users.setdefault(port, []).append(transfer)
        open_transfers = dict.fromkeys(self._transfers)
        while open_transfers:
            # Ports are looked at in the order in which they came into use: ties never depend on hashing.
            tightest = min(users, key=lambda port: left[port] / len(users[port]))
            rate = left[tightest] / len(users[tightest])
            for transfer in users[tightest]:
                transfer.rate = rate
                del open_transfers[transfer]
                for port, _ in transfer.ports:
                    if port != tightest:
                        left[port] -= rate
                        users[port].remove(transfer)
                        if not users[port]:
                            del users[port]
            del users[tightest]
        if self._next is not None:
            self._next.void = True
            self._next = None
        if self._transfers:
            soonest = min(ceil(max(0.0, transfer.left) / transfer.rate) for transfer in self._transfers)
            self._next = Moment(self.env, soonest, self._on_sent, ARRIVAL)

    def _on_sent(self, event: object) -> None:
        if event.void:  # type: ignore[attr-defined]
            return
        self._next = None
        self._count()
        # Less than what one nanosecond carries is left by rounding only.
        sent = [transfer for transfer in self._transfers if transfer.left < transfer.rate]
        self._transfers = [transfer for transfer in self._transfers if transfer.left >= transfer.rate]
        self._share()
        for transfer in sent:
            Moment(self.env, self.latency_ns, lambda event, it=transfer: self._arrived(it), ARRIVAL)  # type: ignore[misc]

    @staticmethod
    def _arrived(transfer: Transfer) -> None:
        if not transfer.cancelled:
            transfer.done()
