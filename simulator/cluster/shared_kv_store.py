"""A KV store that all replicas share: prefixes computed anywhere, kept in the hosts' memory, fetched over RDMA.

Each replica's host gives memory for entries of one prefix hash each. A replica that ends a request leaves the prompt's
entries in its own host; one that gets a request fetches the longest prefix that the store has and its own device cache
has not, if that takes less time than computing it. Entries of other hosts cross both NICs, which transfers share
fairly; entries of its own host come over the host link. From there they go to the device layer by layer, behind the
network. The request is queued when its prefix is there. Least recently used entries go first. (Mooncake, FAST 2025.)
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

from policies import Request, Track
from simulator.clock.virtual_time import ARRIVAL, Moment
from simulator.cluster.kv_transfer import port_bandwidth
from simulator.cluster.network import Fabric, Transfer
from simulator.errors import SimulationError
from simulator.replica.memory_measures import GIB, stored_bytes_per_token
from simulator.replica.running_ahead import Replica

if TYPE_CHECKING:
    from simpy import Event

    from simulator.cluster.cluster import Cluster


class Fetch:
    """One request's prefix on its way; then(tokens) is called when all parts of it have arrived.

    hosts: numbers of the replicas whose hosts it needs, sources and target; new: tokens that the target had not.
    """

    __slots__ = ("bytes", "hosts", "new", "parts", "since_ns", "then", "tokens", "transfers")

    def __init__(self, tokens: int, new: int, since_ns: int, then: Callable[[int], None]) -> None:
        self.tokens, self.new, self.since_ns, self.then = tokens, new, since_ns, then
        self.hosts: set[int] = set()
        self.parts = self.bytes = 0
        self.transfers: list[Transfer] = []


class KVStore:
    """The store of a cluster. entries: per replica, hash -> None, least recently used first; home: hash -> replica."""

    def __init__(self, cluster: Cluster, gib_per_replica: float) -> None:
        config = cluster.plan.config
        if any(pool.role != "serve" for pool in cluster.plan.pools):
            raise SimulationError("--kv-store-gib: found prefill and decode pools, expected replicas that serve")
        if any(pool.engine.ranks > 1 for pool in cluster.plan.pools):
            raise SimulationError("--kv-store-gib with --dp: the store knows hosts of replicas, not of their ranks")
        self.cluster = cluster
        self.fabric = Fabric(cluster.env, round(config.kv_latency_s * 1e9))
        self.entries: dict[int, OrderedDict[int, None]] = {}
        self.home: dict[int, int] = {}
        self._token_bytes = stored_bytes_per_token(config)
        self._room = round(gib_per_replica * GIB)
        self._fetches: dict[int, Fetch] = {}
        self._lives: dict[int, int] = {}
        pools = cluster.plan.pools
        self._nic = [port_bandwidth(pool, config.kv_bandwidth) for pool in pools]
        self._host = [pool.engine.memory.link().bytes_per_s * pool.engine.kv_devices for pool in pools]
        self.hit_tokens = self.bytes_in = self.bytes_out = self.evicted = self._fetched = self._took_ns = 0

    def facts(self) -> dict[str, Any]:
        """What the store did, as plain data."""
        return {
            "store_hit_tokens": self.hit_tokens,
            "store_bytes_in": self.bytes_in,
            "store_bytes_out": self.bytes_out,
            "store_evicted": self.evicted,
            "store_fetches": self._fetched,
            "store_fetch_s_mean": self._took_ns / max(1, self._fetched) / 1e9,
        }

    # Into a replica

    def fetch(self, replica: Replica, request: Request, then: Callable[[int], None]) -> None:
        """Bring what the store has of a prompt to a replica; then(tokens that are there, counted from the first)."""
        hashes, size = request.prefix_hashes, request.hash_tokens
        found = 0
        while found < len(hashes) and hashes[found] in self.home:
            found += 1
        tokens = min(found * size, request.prompt_tokens - 1)
        if tokens <= 0:
            then(0)
            return
        replica.settle()
        here = replica.scheduler.ledger.cached_tokens(Track(request, 1))
        wanted = hashes[here // size : found]
        sizes: dict[int, int] = {}
        for value in wanted:
            sizes[self.home[value]] = sizes.get(self.home[value], 0) + size * self._token_bytes
        pool = self.cluster.pool_number(replica)
        memory = self.cluster.plan.pools[pool].engine.memory
        seconds = sum(part / self._speed(home, replica) for home, part in sizes.items())
        if tokens <= here or seconds * 1e9 >= memory.prefill_ns(tokens - here):
            then(0)
            return
        for value in hashes[:found]:
            self.entries[self.home[value]].move_to_end(value)
        fetch = self._fetches[request.id] = Fetch(tokens, tokens - here, self.cluster.env.now, then)
        fetch.parts = len(sizes)
        fetch.hosts = {replica.number, *sizes}
        self.hit_tokens += tokens - here
        for home, part in sizes.items():
            fetch.bytes += part
            done = partial(self._part_arrived, request.id, fetch)
            if home == replica.number:
                delay = round(part * 1e9 / self._host[pool])
                Moment(self.cluster.env, delay, lambda event, done=done: done(), ARRIVAL)  # type: ignore[misc]
            else:
                source = self._nic[self.cluster.pool_number(self.cluster.replicas[home])]
                fetch.transfers.append(self.fabric.send(home, source, replica.number, self._nic[pool], part, done))

    def cancel(self, row: int) -> bool:
        """Stop a request's fetch; whether there was one. Its then() is not called."""
        fetch = self._fetches.pop(row, None)
        if fetch is None:
            return False
        for transfer in fetch.transfers:
            self.fabric.cancel(transfer)
        return True

    def _part_arrived(self, row: int, fetch: Fetch) -> None:
        fetch.parts -= 1
        if fetch.parts or self._fetches.get(row) is not fetch:
            return
        del self._fetches[row]
        self._fetched += 1
        self._took_ns += self.cluster.env.now - fetch.since_ns
        self.bytes_out += fetch.bytes
        fetch.then(fetch.tokens)

    def _speed(self, home: int, replica: Replica) -> float:
        """Bytes per second of a transfer that shares its way with nobody."""
        pool = self.cluster.pool_number(replica)
        if home == replica.number:
            return self._host[pool]
        return min(self._nic[self.cluster.pool_number(self.cluster.replicas[home])], self._nic[pool])

    # Out of a replica

    def leave(self, replica: Replica, request: Request) -> None:
        """A replica has computed a prompt: its host keeps the entries that the store has not, once they are copied."""
        new = [value for value in request.prefix_hashes if value not in self.home]
        if not new:
            return
        size = len(new) * request.hash_tokens * self._token_bytes
        delay = round(size * 1e9 / self._host[self.cluster.pool_number(replica)])
        life = self._lives.get(replica.number, 0)

        def copied(event: Event) -> None:
            # A host that died while it copied has nothing, also if it is back by now.
            if self._lives.get(replica.number, 0) == life:
                self._keep(replica.number, new, request.hash_tokens)

        Moment(self.cluster.env, delay, copied, ARRIVAL)

    def _keep(self, node: int, hashes: list[int], hash_tokens: int) -> None:
        entry_bytes = hash_tokens * self._token_bytes
        entries = self.entries.setdefault(node, OrderedDict())
        # From the end: a prefix whose beginning is gone is of no use, so beginnings are the most recently used.
        for value in reversed(hashes):
            if value in self.home:
                continue
            while entries and (len(entries) + 1) * entry_bytes > self._room:
                del self.home[entries.popitem(last=False)[0]]
                self.evicted += 1
            if (len(entries) + 1) * entry_bytes > self._room:
                return
            entries[value] = None
            self.home[value] = node
            self.bytes_in += entry_bytes

    def lose(self, replica: Replica) -> list[Callable[[], None]]:
        """A replica's host is gone with its entries, and with whatever was on its way from or to it.

        Returns what is to be called once the replica has left: the requests of those fetches go on without a prefix.
        """
        node = replica.number
        self._lives[node] = self._lives.get(node, 0) + 1
        for value in self.entries.pop(node, ()):
            del self.home[value]
        cut = [(row, fetch) for row, fetch in self._fetches.items() if node in fetch.hosts]
        for row, fetch in cut:
            self.cancel(row)
            self.hit_tokens -= fetch.new
        return [partial(fetch.then, 0) for _, fetch in cut]
