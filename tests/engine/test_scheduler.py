"""The scheduler's decisions one by one, against a model of the device."""

import itertools

import pytest

from jllm.engine.scheduler import Limits, StepPlan
from jllm.errors import ConfigError, RequestError
from tests.engine.scheduler_harness import STOP_ID, Loop, alone, sample


def make(slots=4, tokens=16, chunks=4, page=4, pages=32, deltas=64) -> Loop:
    return Loop(Limits(slots, tokens, tokens, chunks, page, pages, deltas))


def ids(plan: StepPlan):
    """Request ids of the decodes; (id, start, tokens, final) of the chunks."""
    chunks = [(c.seq.request_id, c.start, len(c.tokens), c.final) for c in plan.chunks]
    return [seq.request_id for seq in plan.decodes], chunks


def test_prompts_fill_the_budget_in_order_and_decodes_come_first():
    loop = make(tokens=16)
    for prompt in (10, 9, 20):
        loop.add(prompt)
    assert ids(loop.dispatch()) == ([], [(0, 0, 10, True), (1, 0, 6, False)])
    assert ids(loop.dispatch()) == ([0], [(1, 6, 3, True), (2, 0, 12, False)])
    loop.read()
    assert ids(loop.dispatch()) == ([0, 1], [(2, 12, 8, True)])
    loop.run()


def test_decodes_go_on_before_their_tokens_are_read_but_never_past_max_length():
    loop = make()
    seq = loop.add(5, new_tokens=3)
    assert [ids(loop.dispatch()) for _ in range(3)] == [([], [(0, 0, 5, True)]), ([0], []), ([0], [])]
    assert (seq.computed, seq.in_flight, seq.output) == (7, 3, [])
    assert loop.dispatch() is None
    loop.run()
    assert loop.scheduler.dispatched == 2


def test_one_new_token_needs_no_decode():
    loop = make(pages=4, page=2)
    seq = loop.add(8, new_tokens=1)  # 9 tokens in a pool of 8: the last one gets no KV
    loop.run()
    assert loop.scheduler.dispatched == 0
    assert seq.output == alone(seq)


def test_at_most_max_chunks():
    loop = make(slots=6, chunks=2)
    for _ in range(5):
        loop.add(3)
    chunks = [[c[0] for c in ids(loop.dispatch())[1]] for _ in range(3)]
    assert chunks == [[0, 1], [2, 3], [4]]
    loop.run()


def test_at_most_max_deltas():
    loop = make(slots=2, tokens=40, deltas=3, page=4)
    loop.add(30)
    loop.add(3)
    assert ids(loop.dispatch()) == ([], [(0, 0, 12, False)])
    assert ids(loop.dispatch()) == ([], [(0, 12, 12, False)])
    assert ids(loop.dispatch()) == ([], [(0, 24, 6, True), (1, 0, 3, True)])
    loop.run()


def test_first_come_first_served_even_if_a_later_one_would_fit():
    loop = make(pages=8, page=4)
    loop.add(16, new_tokens=4)
    loop.add(20, new_tokens=4)
    loop.add(2, new_tokens=2)
    assert ids(loop.dispatch()) == ([], [(0, 0, 16, True)])
    assert ids(loop.dispatch()) == ([0], [])  # 20 tokens and a decode need 6 pages; 3 are free
    loop.run()
    assert loop.scheduler.counts.preempted == 0


@pytest.mark.parametrize(("pages", "admitted"), [(9, False), (10, True)])
def test_admission_leaves_a_page_for_each_running_sequence(pages, admitted):
    """Two that run hold 4 pages, the new prompt and its first decode need 4 more: the watermark is 2."""
    loop = make(page=4, pages=pages)
    loop.add(7, new_tokens=9)
    loop.add(7, new_tokens=9)
    loop.dispatch()
    loop.add(12, new_tokens=2)
    assert bool(loop.dispatch().chunks) == admitted
    loop.run()


def test_a_prompt_is_admitted_only_if_all_of_it_fits():
    loop = make(tokens=8, page=4, pages=8)
    loop.add(4, new_tokens=2)
    loop.dispatch()
    loop.add(
        24, new_tokens=2
    )  # with its first decode 7 pages; 6 are free and one is the other's, its first chunk takes 2
    assert ids(loop.dispatch()) == ([0], [])
    loop.run()


def test_a_lone_request_may_take_the_whole_pool():
    loop = make(page=4, pages=5, slots=3)
    loop.add(18, new_tokens=3)
    loop.add(18, new_tokens=3)
    loop.run()
    assert loop.scheduler.counts.preempted == 0


def test_preemption_takes_the_newest_after_a_drain_and_puts_it_in_front():
    loop = make(page=2, pages=12)
    seqs = [loop.add(3, new_tokens=10) for _ in range(3)]
    while loop.step() is not None:
        assert all(seq.preemptions == 0 for seq in seqs)
    assert loop.scheduler.counts.drains == 1
    later = loop.add(1, new_tokens=2)
    kept = list(seqs[2].output)
    assert ids(loop.step()) == ([0, 1], [])
    assert [seq.preemptions for seq in seqs] == [0, 0, 1]
    assert list(loop.scheduler.waiting) == [seqs[2], later]
    assert (seqs[2].computed, seqs[2].in_flight, seqs[2].slot, seqs[2].pages) == (0, 0, None, [])
    assert seqs[2].output == kept == alone(seqs[2])[: len(kept)] != []
    while (plan := loop.step()) is None or not plan.chunks:
        pass
    assert ids(plan)[1][0] == (2, 0, 3 + len(kept), True)  # prompt and output, computed again
    assert loop.scheduler.counts.recomputed == 3 + len(kept) - 1
    loop.run()


def test_a_read_that_frees_pages_saves_a_preemption():
    prompts = itertools.product(range(2, 12), repeat=3)
    stops_second = next(p for p in prompts if (t := sample(p)) != STOP_ID and sample((*p, t)) == STOP_ID)
    loop = make(page=2, pages=6)
    loop.add(5, new_tokens=6)
    seq = loop.add(stops_second, new_tokens=6, stop_id=True)
    loop.step()
    loop.step()
    assert loop.step() is None  # both need a page, one is free; the token in flight is the stop
    assert seq.finish_reason == "stop"
    assert ids(loop.step()) == ([0], [])
    loop.run()
    assert (loop.scheduler.counts.drains, loop.scheduler.counts.preempted) == (1, 0)


def test_pages_that_a_copy_leaves_are_a_reason_to_look_again_at_who_waits():
    loop = make(pages=6)
    loop.add(4, new_tokens=12)
    waits = loop.add(8)  # three pages, and one for the first to grow into
    loop.scheduler.retired.append((0, loop.scheduler.pool.allocate(3)))  # as if the first step copied these
    assert ids(loop.dispatch()) == ([], [(0, 0, 4, True)])
    loop.read()
    loop.dispatch()
    assert waits.slot is not None
    loop.run()


def test_slot_and_pages_stay_until_the_last_step_that_may_write_them_is_read():
    loop = make(slots=1)
    seq = loop.add(5, new_tokens=9)
    loop.dispatch()
    loop.dispatch()
    waiting = loop.add(2)
    loop.read()
    loop.scheduler.finish(seq, "stop")
    assert (seq.slot, len(seq.pages)) == (0, 2)
    assert loop.dispatch() is None
    loop.read()
    assert (seq.slot, seq.pages, loop.scheduler.pool.num_free) == (None, [], 32)
    loop.scheduler.on_tokens(seq, [5])  # surplus
    assert len(seq.output) == 1
    assert loop.dispatch().chunks[0].seq is waiting
    loop.read()


@pytest.mark.parametrize("stage", ["waiting", "prefilling", "decoding", "read", "preempted", "finished"])
def test_abort_at_any_stage(stage):
    loop = make(slots=2, tokens=4, page=2, pages=8)
    first = loop.add(3, new_tokens=12)
    seq = loop.add(6, new_tokens=6)
    reached = {
        "waiting": lambda: seq.slot is None,
        "prefilling": lambda: 0 < seq.computed < 6,
        "decoding": lambda: seq.in_flight and seq.computed > 6,
        "read": lambda: seq.output and not loop.unread,
        "preempted": lambda: seq.preemptions,
        "finished": lambda: seq.finished,
    }[stage]
    while not reached():
        loop.step(late=stage != "read")
    reason = seq.finish_reason or "abort"
    loop.abort(seq)
    loop.abort(seq)
    loop.check_state()
    assert seq.finish_reason == reason
    loop.run()
    assert first.finish_reason == "length"


def test_a_lost_device_recomputes_all_that_ran():
    loop = make(slots=2)
    a, b, c = (loop.add(5) for _ in range(3))
    for _ in range(2):
        loop.dispatch()
    loop.read()
    loop.abort(b)
    loop.lose_device()
    assert list(loop.scheduler.waiting) == [a, c]
    assert (a.output, a.computed, a.in_flight) == (alone(a)[:1], 0, 0)
    assert loop.scheduler.pool.num_free == 32
    loop.check_state()
    assert ids(loop.dispatch()) == ([], [(0, 0, 6, True), (2, 0, 5, True)])
    loop.run()


def test_a_sequence_may_start_with_output():
    """A fork: what was generated so far is prefilled with the prompt."""
    loop = make()
    seq = loop.add(3, new_tokens=5)
    seq.output.extend(alone(seq)[:2])
    assert ids(loop.dispatch()) == ([], [(0, 0, 5, True)])
    loop.run()


def test_requests_that_can_never_run_are_refused():
    loop = make(page=4, pages=4)
    with pytest.raises(RequestError, match="3 prompt tokens and 15 new ones need 5 pages of 4, the page pool has 4"):
        loop.add(3, new_tokens=15)
    with pytest.raises(RequestError, match="at least 1 token"):
        loop.add(0)
    with pytest.raises(RequestError, match="fewer than max_length = 3, not 3"):
        loop.add(3, new_tokens=0)
    assert loop.scheduler.idle
    loop.add(3, new_tokens=14)
    loop.run()


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("page_size", 0, "page_size must be at least 1, not 0"),
        ("max_step_tokens", 3, r"max_step_tokens must be at least max_slots = 4 \(one token a slot\), not 3"),
        ("num_pages", 2, r"num_pages must be at least max_slots = 4 \(one page a slot\), not 2"),
        ("max_deltas", 3, r"max_deltas must be at least max_slots = 4 \(one page table change a slot\), not 3"),
    ],
)
def test_limits_that_cannot_work(name, value, message):
    sizes = {"max_slots": 4, "max_step_tokens": 4, "max_prompt_tokens": 1, "max_chunks": 1}
    sizes |= {"page_size": 8, "num_pages": 4, "max_deltas": 4}
    Limits(**sizes)
    with pytest.raises(ConfigError, match=message):
        Limits(**{**sizes, name: value})


def test_misuse_by_the_loop_is_an_error_and_no_hang():
    loop = make()
    seq = loop.add(3, new_tokens=1)
    with pytest.raises(AssertionError, match="not in flight"):
        loop.scheduler.on_tokens(seq, [5])
    loop.dispatch()
    with pytest.raises(AssertionError, match="step 1 read after -1, dispatched up to 0"):
        loop.scheduler.step_read(1)
    loop.scheduler.on_tokens(seq, [5])
    loop.scheduler.step_read(0)
    with pytest.raises(AssertionError, match="was read but not finished"):
        loop.scheduler.schedule()
    loop.scheduler.finish(seq, "length")
    with pytest.raises(AssertionError, match="has already ended: length"):
        loop.scheduler.finish(seq, "stop")
