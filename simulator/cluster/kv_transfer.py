"""Prompts on one pool, answers on another: how a request's KV cache gets from the prefill replica to the decode one.

The decode replica pulls. When a prompt is done its decode replica is chosen, and as soon as that one has room for the
KV (it takes the blocks then) the transfer begins; until it has ended the prefill replica keeps its copy, so a full
decode pool holds prompts back instead of losing them. Layer by layer, the transfer may begin when the iteration does
that ends the prompt: all layers but the last travel behind the computation, the last one after it.
"""

from __future__ import annotations

from bisect import insort
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from operator import attrgetter
from random import Random
from typing import TYPE_CHECKING, Any

from policies import Ns, Request, Track
from profiler import load_hardware, load_model_spec
from simulator.cluster.network import Fabric, Transfer
from simulator.cluster.pools import Pool
from simulator.errors import SimulationError
from simulator.replica.memory_measures import stored_bytes_per_token
from simulator.replica.running_ahead import Replica
from simulator.routers import choose, make_router

if TYPE_CHECKING:
    from simulator.cluster.cluster import Cluster
    from simulator.cluster.journeys import Journey

_by_number = attrgetter("number")


@dataclass(slots=True, eq=False)
class Move:
    """One request's KV between two replicas. size: its bytes. track: the request as the target expects it.

    prompt_done: the source has delivered the token that ends its part (layer by layer the move begins before that);
    early: bytes sent before.
    """

    journey: Journey
    source: Replica
    computed: int
    produced: int
    size: int
    prompt_done: bool
    asked_ns: Ns
    target: Replica | None = None
    track: Track | None = None
    reserved: bool = False
    transfer: Transfer | None = None
    early: int = 0


class Disaggregation:
    """The moves of a cluster with prefill and decode pools. It owns a request from the end of its prompt until its KV
    has arrived."""

    def __init__(self, cluster: Cluster) -> None:
        config = cluster.plan.config
        self.cluster = cluster
        self.layerwise = config.layerwise_kv
        self.up: list[Replica] = []
        self.fabric = Fabric(cluster.env, round(config.kv_latency_s * 1e9))
        self.router = make_router(config.decode_router, config.decode_router_knobs)
        self._rng = Random(f"{config.seed} decode router")
        self._layers = load_model_spec(config.model).layers
        self._bytes_per_token = stored_bytes_per_token(config)
        self._bandwidth = [port_bandwidth(pool, config.kv_bandwidth) for pool in cluster.plan.pools]
        self._moves: dict[int, Move] = {}
        self._queues: dict[int, deque[Move]] = {}
        self._unplaced: list[Move] = []
        # A scheduler of each decode pool, by the pool's number: all replicas of a pool refuse the same requests.
        self._deciding = {
            number: pool.engine.scheduler() for number, pool in enumerate(cluster.plan.pools) if pool.role == "decode"
        }
        self._moved = self._bytes = self._waited_ns = self._took_ns = 0

    def facts(self) -> dict[str, Any]:
        """What was moved, as plain data. wait: from the end of the prompt until room was found and sending began."""
        moved = max(1, self._moved)
        return {
            "transfers": self._moved,
            "bytes": self._bytes,
            "bytes_per_token": self._bytes_per_token,
            "wait_s_mean": self._waited_ns / moved / 1e9,
            "after_prompt_s_mean": self._took_ns / moved / 1e9,
        }

    # The prefill side

    def submit(self, replica: Replica, request: Request, output_tokens: int, produced: int) -> None:
        """Give a request to a prefill replica for its next token; it goes on elsewhere if it wants more."""
        more = output_tokens > produced + 1
        if more and (reason := self._why_not(request)):
            self.cluster.end_unplaced(request, output_tokens, "rejected", reason)
            return
        self.cluster.journey(request, output_tokens)
        until_then = request._replace(max_output_tokens=produced + 1)
        replica.submit(until_then, produced + 1, produced=produced, hands_over=more)

    def last_chunk_begins(self, track: Track, source: Replica) -> None:
        """Layer by layer: the iteration that ends a prompt has been launched."""
        self.cancel(track.request.id)
        self._place(self._move(track, source, track.produced + 1, prompt_done=False))

    def prompt_ends(self, track: Track, source: Replica) -> None:
        """A prompt is complete and its token delivered; the source holds its blocks from now on."""
        move = self._moves.get(track.request.id)
        if move is None:
            self._place(self._move(track, source, track.produced, prompt_done=True))
            return
        move.prompt_done = True
        move.asked_ns = self.cluster.env.now
        if move.reserved and move.transfer is None:
            self._send(move)

    def _move(self, track: Track, source: Replica, produced: int, prompt_done: bool) -> Move:
        computed = track.context
        journey = self.cluster.journeys[track.request.id]
        size = computed * self._bytes_per_token
        move = Move(journey, source, computed, produced, size, prompt_done, self.cluster.env.now)
        self._moves[track.request.id] = move
        return move

    # The decode side

    def open(self, replica: Replica) -> None:
        """A decode replica takes requests from now on."""
        replica.on_room = self.room
        insort(self.up, replica, key=_by_number)
        unplaced, self._unplaced = self._unplaced, []
        for move in unplaced:
            self._place(move)

    def room(self, replica: Replica) -> None:
        """A decode replica may have room: begin the transfers that wait for it, first come first served."""
        queue = self._queues.get(replica.number)
        while queue:
            move = queue[0]
            assert move.track is not None
            replica.settle()
            if not replica.scheduler.handover.reserve(move.track):
                return
            queue.popleft()
            move.reserved = True
            self._send(move)

    def _place(self, move: Move) -> None:
        """Choose the replica that decodes a request, and queue for room there."""
        request = move.journey.request
        refuses = {pool: bool(scheduler.why_not(request)) for pool, scheduler in self._deciding.items()}
        able = self.up
        if any(refuses.values()):
            able = [replica for replica in self.up if not refuses[self.cluster.pool_number(replica)]]
        if not able:
            if move.prompt_done:
                self._park(move)
            else:
                del self._moves[request.id]
            return
        move.target = target = choose(self.router, request, able, self._rng)
        target.settle()
        move.track = target.scheduler.handover.receive(
            request,
            self.cluster.env.now,
            ends_after=move.journey.output_tokens,
            computed=move.computed,
            produced=move.produced,
        )
        self._queues.setdefault(target.number, deque()).append(move)
        self.room(target)

    def _park(self, move: Move) -> None:
        """No decode replica is up: wait for one, or fail."""
        if self.cluster.somebody_comes(decode=True):
            self._unplaced.append(move)
        else:
            self._fail(move)

    def fail_unplaced(self) -> int:
        """Nobody will come any more: end those who wait for a decode replica; returns how many there were."""
        unplaced, self._unplaced = self._unplaced, []
        for move in unplaced:
            self._fail(move)
        return len(unplaced)

    def _fail(self, move: Move) -> None:
        self._release(move)
        self.cluster.end_journey(move.journey, move.source.number, "failed", "no decode replica is up")

    # On the wire

    def _send(self, move: Move) -> None:
        """Send what may be sent now: all that is left once the prompt is done, before that all layers but one."""
        assert move.target is not None
        if move.prompt_done:
            size = move.size - move.early
            if not move.early:
                self._waited_ns += self.cluster.env.now - move.asked_ns
        else:
            size = move.early = move.size * (self._layers - 1) // self._layers
        source, target = move.source, move.target
        last = move.prompt_done
        move.transfer = self.fabric.send(
            source.number,
            self._bandwidth[self.cluster.pool_number(source)],
            target.number,
            self._bandwidth[self.cluster.pool_number(target)],
            size,
            lambda: self._sent(move, last),
        )

    def _sent(self, move: Move, last: bool) -> None:
        move.transfer = None
        if not last:
            if move.prompt_done:
                self._send(move)
            return
        self._moved += 1
        self._bytes += move.size
        self._took_ns += self.cluster.env.now - move.asked_ns
        self._release(move)
        target = move.target
        assert target is not None
        assert move.track is not None
        target.settle()
        target.scheduler.handover.arrive(move.track)
        target.wake()
        self.cluster.arrived(move.journey, target)

    def _release(self, move: Move) -> None:
        """The source's copy is needed no more."""
        row = move.journey.request.id
        del self._moves[row]
        move.source.settle()
        move.source.scheduler.handover.release(row)
        move.source.wake()

    # Ends on the way

    def owns(self, row: int) -> bool:
        """Whether a request is between its prompt's end and its KV's arrival."""
        move = self._moves.get(row)
        return move is not None and move.prompt_done

    def cancel(self, row: int) -> Move | None:
        """Stop the move of a request, wherever it stands; both sides forget it."""
        move = self._moves.get(row)
        if move is None:
            return None
        self._detach(move)
        if move in self._unplaced:
            self._unplaced.remove(move)
        self._release(move)
        return move

    def source_dies(self, replica: Replica) -> list[Journey]:
        """The KV on a prefill replica is lost: the journeys that depended on it."""
        moves = [move for move in self._moves.values() if move.source is replica]
        for move in moves:
            self.cancel(move.journey.request.id)
        return [move.journey for move in moves if move.prompt_done]

    def target_dies(self, replica: Replica) -> Callable[[], None]:
        """Moves towards a replica that dies; call the result when it is gone, and they go elsewhere."""
        moves = [move for move in self._moves.values() if move.target is replica]
        for move in moves:
            self._detach(move)

        def go_elsewhere() -> None:
            for move in moves:
                if move.prompt_done:
                    self._place(move)
                else:
                    del self._moves[move.journey.request.id]

        return go_elsewhere

    def _detach(self, move: Move) -> None:
        """Take a move back from its target."""
        if move.transfer is not None:
            self.fabric.cancel(move.transfer)
        if move.target is not None:
            target = move.target
            if not move.reserved:
                self._queues[target.number].remove(move)
            target.take_out([move.journey.request.id], "moved elsewhere")
            move.target = move.track = move.transfer = None
            move.reserved, move.early = False, 0
            self.room(target)

    def _why_not(self, request: Request) -> str:
        """Why no decode replica could ever run a request; empty if one can."""
        reasons = [scheduler.why_not(request) for scheduler in self._deciding.values()]
        return "" if not all(reasons) else f"decode pool: {reasons[0]}"


def port_bandwidth(pool: Pool, nic_bytes_per_s: float | None) -> float:
    """Bytes per second in and out of one replica: a NIC for each of its devices that holds keys and values."""
    if nic_bytes_per_s is None:
        hardware = load_hardware(pool.engine.config.gpu)
        nic_bytes_per_s = hardware.network_bandwidth
        if nic_bytes_per_s is None:
            raise SimulationError(f"gpu {hardware.name}: its network is not known; give --kv-bandwidth (bytes/s a NIC)")
    return nic_bytes_per_s * pool.engine.kv_devices
