"""What a policy may ask of a draft, beyond what the policies' own examples show."""

from dataclasses import dataclass

from policies import NS_PER_S, BlockLedger, CountingLedger, Host, Policy, Promises, Request, Scheduler
from tests.policies.driving import drive
from tests.policies.worked import asked, batches, token_seconds, work_through

A, B, C = 0, 1, 2


@dataclass(frozen=True)
class Asking(Policy):
    """Admits whole prompts, then asks whatever the test gives it."""

    ask: object = None
    promises = Promises(decodes=True)

    def plan(self, queues, draft, kv, host, now_ns):
        while queues.waiting and draft.admit(queues.waiting[0], 1 << 30):
            pass
        if not draft.parts:
            self.ask(queues, draft)


def scheduler_asking(ask, *, pool=100, **more) -> Scheduler:
    return Scheduler(Asking(ask), CountingLedger(pool, 4), **more)


def test_decode_all_grants_at_most_so_many_earliest_admitted_first():
    log = work_through(
        scheduler_asking(lambda queues, draft: draft.decode_all(2)), [asked(row, 0, 2, 2) for row in (A, B, C)]
    )
    assert [rows for _, rows, _ in batches(log)][1:] == [[(A, 1, 2), (B, 1, 2)], [(C, 1, 2)]]


def test_decode_all_stops_at_the_budget_without_preempting():
    scheduler = scheduler_asking(lambda queues, draft: draft.decode_all(), token_budget=4)
    log = work_through(scheduler, [asked(A, 0, 2, 3), asked(B, 0, 2, 3)])
    assert len(log.finished) == 2
    scheduler = scheduler_asking(lambda queues, draft: draft.decode_all(), token_budget=1)
    log = work_through(scheduler, [asked(A, 0, 1, 2), asked(B, 0, 1, 2)])
    assert [rows for _, rows, _ in batches(log)] == [[(A, 1, 0)], [(B, 1, 0)], [(A, 1, 1)], [(B, 1, 1)]]
    assert scheduler.preemptions == 0


def test_decode_all_preempts_the_last_admitted_or_whom_the_policy_says():
    # 4 blocks for A's and B's 4 tokens, C's 4 and one free: all three need one more.
    requests = [asked(A, 0, 4, 2), asked(B, 0, 4, 2), asked(C, 0, 4, 2)]
    last = work_through(scheduler_asking(lambda queues, draft: draft.decode_all(), pool=4), requests)
    assert batches(last)[1] == (1, [(A, 1, 4), (B, 1, 4)], 0)
    oldest_goes = scheduler_asking(
        lambda queues, draft: draft.decode_all(first_to_go=lambda track: -track.order), pool=4
    )
    assert batches(work_through(oldest_goes, requests))[1] == (1, [(B, 1, 4), (C, 1, 4)], 0)


def test_pad_to_fills_up_to_so_many_rows_and_never_takes_any_away():
    log = work_through(
        scheduler_asking(lambda queues, draft: (draft.decode_all(), draft.pad_to(5 if draft.tokens == 2 else 0))),
        [asked(A, 0, 2, 3), asked(B, 0, 2, 2)],
    )
    assert [(shape.tokens, shape.dummy_tokens, shape.rows) for _, _, shape, _ in log.batches] == [
        (4, 0, 4),
        (2, 3, 5),
        (1, 0, 1),
    ]


def test_a_plan_only_for_now_is_never_leapt_over():
    def decode(queues, draft):
        draft.decode_all()
        if queues.num_running == 2:
            draft.only_for_now()

    requests = [asked(A, 0, 2, 30), asked(B, 0, 2, 10)]
    free = drive(scheduler_asking(lambda queues, draft: draft.decode_all()), requests, leaping=True)
    bound = drive(scheduler_asking(decode), requests, leaping=True)
    assert (free.leaps, bound.leaps) == (2, 1)
    assert bound.token_times == free.token_times


def test_to_prefill_leaves_out_prefix_hits_and_what_was_handed_over():
    seen = []

    class Looking(Asking):
        def plan(self, queues, draft, kv, host, now_ns):
            seen.extend((track.request.id, draft.to_prefill(track)) for track in queues.waiting)
            super().plan(queues, draft, kv, host, now_ns)

    ledger = BlockLedger(100, 4, prefix_caching=True)
    scheduler = Scheduler(Looking(lambda queues, draft: draft.decode_all()), ledger)
    prompt = {"prompt_tokens": 10, "max_output_tokens": 1, "prefix_hashes": (7, 8), "hash_tokens": 4}
    scheduler.add(Request(A, 0, **prompt), 0)
    scheduler.complete(scheduler.plan(0), 1)
    scheduler.add(Request(B, 0, **prompt), 1)
    scheduler.add(Request(C, 0, 10, 2), 1, computed=9)
    batch = scheduler.plan(1)
    assert seen == [(A, 10), (B, 2), (C, 1)]
    assert batch.shape.chunks == ((2, 8), (1, 9))


def test_queues_tell_what_waits_per_class_and_what_runs_per_slo():
    seen = []

    def look(queues, draft):
        seen.append((dict(queues.running_by_slo), queues.anybody_decodes))
        waiting.append({key: [t.request.id for t in tracks] for key, tracks in queues.waiting_by_class.items()})
        draft.decode_all()

    waiting = []
    scheduler = scheduler_asking(look, max_num_seqs=2)
    requests = [
        asked(A, 0, 1, 2, slo="chat"),
        asked(B, 0, 1, 2),
        asked(C, 0, 1, 1, priority=3, slo="chat"),
        asked(3, 0, 1, 1, slo="chat"),
        asked(4, 0, 1, 1, priority=3, slo="chat"),
    ]
    log = work_through(scheduler, requests)
    assert seen[0] == ({"chat": 1, None: 1}, True)
    assert waiting[0] == {(3, "chat"): [C, 4], (0, "chat"): [3]}
    assert token_seconds(log)[4] == [4]
    assert seen[-1] == ({}, False)


def test_a_cohort_remembers_the_most_members_it_had():
    peaks = []

    def look(queues, draft):
        peaks.extend((cohort.size, cohort.peak) for cohort in queues.cohorts)
        draft.decode_all()

    work_through(scheduler_asking(look), [asked(A, 0, 1, 3), asked(B, 0, 1, 2), asked(C, 0, 1, 1)])
    assert peaks == [(2, 3), (1, 3)]


def test_an_alarm_asks_the_policy_again_at_its_time():
    class Late(Asking):
        def plan(self, queues, draft, kv, host, now_ns):
            if now_ns < 3 * NS_PER_S:
                draft.wait_until(5 * NS_PER_S)
                draft.wait_until(3 * NS_PER_S)
                draft.wait_until(4 * NS_PER_S)
            else:
                super().plan(queues, draft, kv, host, now_ns)

    scheduler = Scheduler(Late(lambda queues, draft: draft.decode_all()), CountingLedger(100, 4), Host())
    log = work_through(scheduler, [asked(A, 1, 2, 2)])
    assert [second for second, _, _ in batches(log)] == [3, 4]
