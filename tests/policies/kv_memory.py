"""A memory that remembers what lies where: plays a batch's copies and writes, and checks everything that it reads."""

from __future__ import annotations

from policies import Batch, BlockLedger, Chunk, Request, Scheduler


class KVMemory:
    """Device blocks and host slots as lists of token names. Prompts agree wherever their prefix hashes do."""

    def __init__(self, scheduler: Scheduler) -> None:
        self.ledger = scheduler.ledger
        assert isinstance(self.ledger, BlockLedger)
        self.size = self.ledger.block_size
        self.device: dict[int, list] = {}
        self.host: dict[int, list] = {}

    def token(self, request: Request, position: int):
        if position < min(request.prompt_tokens, len(request.prefix_hashes) * request.hash_tokens):
            return ("hash", request.prefix_hashes[position // request.hash_tokens], position)
        return (request.id, position)

    def run(self, batch: Batch, scheduler: Scheduler) -> None:
        """What an engine does with a batch that was planned just now."""
        host_slots = scheduler.swap.memory.blocks if scheduler.swap is not None else 0
        for move in batch.swap_out:
            assert move.num_blocks == len(move.blocks) == len(move.slots)
            for block, slot in zip(move.blocks, move.slots):
                assert 0 <= slot < host_slots
                self.host[slot] = list(self.device[block])
        for move in batch.swap_in:
            assert move.num_blocks == len(move.blocks) == len(move.slots)
            for block, slot in zip(move.blocks, move.slots):
                self.device[block] = list(self.host[slot])
        for part in batch.parts:
            if isinstance(part, Chunk):
                self._step(part.track, part.prefix, part.tokens)
            else:
                for track in part.cohort.members():
                    if track.decodes_from <= part.step:
                        self._step(track, track.base + part.step, 1)

    def _step(self, track, prefix: int, tokens: int) -> None:
        request, table, size = track.request, self.ledger.table(track), self.size
        for position in range(prefix):
            found = self.device[table[position // size]][position % size]
            assert found == self.token(request, position), f"{track}: position {position} holds {found}"
        for position in range(prefix, prefix + tokens):
            block = self.device.setdefault(table[position // size], [None] * size)
            block[position % size] = self.token(request, position)
