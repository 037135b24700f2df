"""The prefix cache of extents against the one by block id: the same blocks are found, refused and overwritten next."""

from __future__ import annotations

from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from policies import BlockLedger, ExtentLedger, Host, Request, Scheduler, make_policy
from policies.kv_memory.swap import HostMemory, Swap
from policies.work.track import Track
from tests.policies.driving import drive
from tests.policies.test_invariants import BLOCK, check_conservation, engines


@st.composite
def shared_texts(draw: st.DrawFn) -> list[tuple[Request, int]]:
    """Requests whose prompts begin alike, with turns of conversations among them; hashes that blocks do not divide."""
    tokens = draw(st.sampled_from([1, 3, 4, 6, 8, 40]))
    rows = draw(
        st.lists(
            st.tuples(
                st.sampled_from([0, 0, 300, 4000]),
                st.integers(1, 60),
                st.integers(1, 24),
                st.integers(0, 3),
                st.integers(0, 2),
                st.integers(0, 12),
                st.sampled_from([None, None, "a", "b"]),
            ),
            min_size=2,
            max_size=14,
        )
    )
    requests, now = [], 0
    for row, (gap, prompt, output, slack, family, own_from, session) in enumerate(rows):
        now += gap
        hashes = tuple(
            family * 1000 + at if at < own_from else 10_000 + row * 100 + at for at in range(-(-prompt // tokens))
        )
        # Some know the names of their beginning only, some none.
        hashes = hashes[: len(hashes) - row % 3] if row % 7 else ()
        requests.append(
            (Request(row, now, prompt, output + slack, hashes, tokens if hashes else 0, session=session), output)
        )
    return requests


def scheduler_for(engine: dict[str, Any], ledger: BlockLedger | ExtentLedger) -> Scheduler:
    host = Host(micro_batches=engine["depth"], tile=16, estimator=lambda shape: 1000 + 10 * shape.rows)
    if engine["ahead"]:
        host = Host(tile=16, chase_chunks=True, chase_decodes=True)
    swap = Swap(HostMemory(engine["pages"], 2), "swap") if engine["pages"] else None
    policy = make_policy(*engine["policy"])
    return Scheduler(
        policy, ledger, host, token_budget=engine["token_budget"], max_num_seqs=engine["max_num_seqs"], swap=swap
    )


@given(
    shared_texts(),
    engines(st.integers(24, 60)),
    st.integers(0, 8),
    st.sampled_from(["0.19", "0.32"]),
    st.booleans(),
    st.booleans(),
)
@settings(max_examples=250, deadline=None)
def test_extents_are_the_ledger_by_id_block_by_block(requests, engine, pages, free_order, ahead, asking) -> None:
    ahead = ahead and engine["policy"][0] == "vllm_v1"
    engine = {**engine, "pages": pages if pages > 2 else 0, "ahead": ahead, "depth": 1 if ahead else engine["depth"]}
    if ahead:
        engine["token_budget"] = None
    seen, logs = [], []
    for made in (BlockLedger, ExtentLedger):
        by_id = {"prefix_caching": True} if made is BlockLedger else {}
        ledger = made(engine["pool"], BLOCK, 96, free_order=free_order, **by_id)
        scheduler = scheduler_for(engine, ledger)
        steps: list[Any] = []

        def look(scheduler, ledger=ledger, steps=steps):
            asked = []
            # Asking is what routers and queues do, and moves the remembered look-up from one request to the next.
            for track in scheduler.queues.waiting if asking else ():
                cached = ledger.cached_tokens(track)
                asked.append((cached, ledger.admission_blocks(track, cached, track.known)))
            assert ledger.free_blocks == len(ledger.next_overwritten())
            steps.append((ledger.next_overwritten(), asked))

        log = drive(scheduler, requests, depth=2 if ahead else engine["depth"], each_step=look)
        check_conservation(log, requests, scheduler)
        seen.append(steps)
        logs.append(log)
        ledger.forget()
        assert ledger.next_overwritten() == [None] * engine["pool"]
    assert logs[0].batches == logs[1].batches
    assert logs[0].token_times == logs[1].token_times
    assert seen[0] == seen[1]


def admitted(ledger: ExtentLedger, row: int, prompt: int, hashes: tuple[int, ...], tokens: int = 8) -> Track:
    track = Track(Request(row, 0, prompt, 10, hashes, tokens), 10)
    cached = ledger.cached_tokens(track)
    ledger.admit(track, cached)
    ledger.extend(track, prompt)
    ledger.computed(track, prompt)
    track.own_context = prompt
    return track


def test_a_request_that_ends_within_an_extent_takes_its_beginning_and_leaves_the_rest_in_its_place() -> None:
    ledger = ExtentLedger(20, 4)
    first = admitted(ledger, 0, 32, (1, 2, 3, 4))
    ledger.release(first)
    # Given out from the end of the text, so that what is overwritten first is of the least use.
    assert ledger.next_overwritten()[12:] == [(key, at) for key, at in zip((4, 4, 3, 3, 2, 2, 1, 1), range(7, -1, -1))]
    second = admitted(ledger, 1, 13, (1, 2))
    assert second.blocks == 4
    assert ledger.free_blocks == 16
    assert ledger.next_overwritten()[11:] == [(4, 7), (4, 6), (3, 5), (3, 4), (2, 3)]
    ledger.release(second)
    assert ledger.next_overwritten()[-3:] == [(2, 2), (1, 1), (1, 0)]


def test_what_two_hold_is_freed_when_the_second_lets_go() -> None:
    ledger = ExtentLedger(20, 4)
    first = admitted(ledger, 0, 32, (1, 2, 3, 4))
    second = admitted(ledger, 1, 20, (1, 2))
    # Four blocks are shared; the second's own fifth, of a text without hashes, is nobody else's.
    assert ledger.free_blocks == 20 - 8 - 1
    ledger.release(first)
    assert ledger.free_blocks == 20 - 5
    ledger.release(second)
    assert ledger.free_blocks == 20


def test_work_goes_with_hashes_and_not_with_blocks() -> None:
    """A text of a million tokens under one hash is one extent, however often parts of it are used."""
    ledger = ExtentLedger(100_000, 16)
    whole = 1_000_000
    track = Track(Request(0, 0, whole, 10, (1,), whole), 10)
    ledger.admit(track, 0)
    ledger.extend(track, whole)
    for upto in range(2048, whole, 2048):
        ledger.computed(track, upto)
    ledger.computed(track, whole)
    track.own_context = whole
    assert track.extents is not None
    assert len(track.extents) == 1
    ledger.release(track)
    for row in range(1, 50):
        other = admitted(ledger, row, 16 * 997 * row + 1, (1,), whole)
        ledger.release(other)
    text = ledger.next_overwritten()[-62500:]
    assert text == [(1, at) for at in range(62_499, -1, -1)]
    assert len(ledger._copies[1]) <= 50
