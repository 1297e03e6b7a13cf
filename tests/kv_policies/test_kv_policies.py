"""Decisions of the KV policies one by one, and what they promise together."""

from collections.abc import Callable
from functools import partial

import numpy as np
import pytest

from jllm.engine.kv_policy import OnDemand, policy_of
from jllm.engine.pages import PagePool
from jllm.engine.request import SamplingParams
from jllm.engine.scheduler import Limits, Scheduler
from jllm.engine.sequence import Sequence
from jllm.errors import ConfigError, RequestError
from jllm.kv_policies.extent import Extent
from jllm.kv_policies.length import Longest, Oracle, Quantile
from jllm.kv_policies.predicted import Predicted, peak_pages
from jllm.kv_policies.reserve import Reserve
from jllm.kv_policies.runs import RunPool
from tests.engine.scheduler_harness import Loop

P = 4


def seq(known: int, most: int, expected: int = 0, computed: int = 0, pages=(), arrival: int = 0) -> Sequence:
    """A sequence of a prompt of `known` tokens that may come to `most`; its seed says how long its output gets."""
    params = SamplingParams(max_new_tokens=most - known, seed=expected)
    return Sequence(
        arrival, 0, (1,) * known, params, 0, most, computed=computed, pages=list(pages), arrival=arrival,
        prefill_end=known, slot=0 if computed else None,
    )  # fmt: skip


class Fixed(Longest):
    """An output of some tokens, then of some more."""

    def __init__(self, tokens: int):
        self.tokens = tokens

    def predict(self, prompt, params, quantile, produced=0):
        return produced + self.tokens


@pytest.mark.parametrize("name", ["paged", "reserve", "extent"])
def test_what_could_never_fit_is_refused_with_the_numbers(name):
    policy = policy_of(name)
    policy = policy.over(policy.make_pool(5, P))
    says = "3 prompt tokens and 19 new ones need 6 pages of 4, the page pool has 5: shorten the request or raise num_"
    with pytest.raises(RequestError, match=says):
        policy.check(3, 22)
    policy.check(3, 21)


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (lambda: Extent("mean"), "predictor must be an object like length.Predictor, not 'mean'"),
        (lambda: Predicted(object()), "predictor must be an object like length.Predictor, not <object"),
        (
            lambda: Predicted(Longest(), quantile=0.9),
            "quantile has no meaning with the predictor Longest: leave it out",
        ),
        (lambda: Predicted(Quantile(), quantile=0), r"quantile must be a number in \(0, 1\), not 0"),
        (lambda: Extent(quantile=1.0), r"quantile must be a number in \(0, 1\), not 1\.0"),
        (lambda: OnDemand(watermark=True), r"watermark must be a number in \[0, 1\), not True"),
        (lambda: Extent(overflow="swap"), "overflow must be scatter or move, not 'swap'"),
    ],
)
def test_bad_options_of_policies_are_named(make, says):
    with pytest.raises(ConfigError, match=says):
        make()


def test_one_policy_over_two_pools_learns_from_both():
    given = Extent(Quantile())
    one, two = (given.over(given.make_pool(8, P)) for _ in range(2))
    assert one.admit(seq(6, 20), [])
    assert (one.pool.num_free, two.pool.num_free) == (3, 8)
    for _ in range(Quantile.FEWEST):
        ended = seq(6, 20)
        ended.output, ended.finish_reason = [1], "stop"
        one.observe(ended)
    after = seq(6, 20)
    assert two.admit(after, [])
    assert len(after.pages) == 2


def test_reserve_takes_the_longest_up_front_and_never_again():
    pool = PagePool(10, P)
    policy = Reserve().over(pool)
    a, b = seq(5, 22), seq(5, 22)
    assert policy.admit(a, [])
    assert (len(a.pages), pool.num_free) == (6, 4)
    assert not policy.admit(b, [a])
    assert (b.pages, pool.num_free) == ([], 4)
    with pytest.raises(AssertionError, match="outgrew what was reserved"):
        policy.grow(a, 1, 0, 10)


def test_paged_keeps_a_watermark_but_not_from_a_sequence_alone():
    pool = PagePool(20, P)
    policy = OnDemand(watermark=0.25).over(pool)
    first = seq(79, 81)
    assert policy.admit(first, [])  # all 20 pages
    running = [seq(5, 30)]
    assert policy.admit(seq(55, 81), running)  # 14 pages, 1 for the one that runs, 5 kept
    assert not policy.admit(seq(56, 81), running)
    assert pool.num_free == 20, "pages are taken as tokens come"


def test_paged_with_a_predictor_admits_what_it_can_hold_to_the_end():
    pool = PagePool(12, P)
    policy = Predicted(Fixed(16)).over(pool)
    a = seq(4, 100)
    assert policy.admit(a, [])
    policy.grow(a, 1, 0, 9)
    a.computed = 4
    b = seq(4, 100)  # each comes to 19 tokens of KV: with the round-ups (2 * 19 + 2 * 3) // 4 = 11 pages
    assert policy.admit(b, [a])
    policy.grow(b, 1, 0, 9)
    b.computed = 4
    assert not policy.admit(seq(4, 100), [a, b])
    late = seq(4, 100, computed=16, pages=pool.allocate(4))  # ends before the third has grown
    late.expected = 19
    policy.release(b)
    assert policy.admit(seq(4, 100), [late])


def test_pages_that_were_found_are_not_counted_on_when_a_sequence_ends():
    """Two share 8 of 20 pages; a third is to grow by 9 pages, after the two have given back what is theirs alone."""
    pool = PagePool(20, P)
    policy = Predicted(Fixed(36)).over(pool)
    shared = pool.allocate(8)
    running = []
    for i in range(2):
        pool.share(shared)
        s = seq(36, 100, computed=36, pages=[*shared, *pool.allocate(1)], arrival=i)
        s.cached, s.expected = 32, 40
        running.append(s)
    pool.free(shared)
    new = seq(4, 100)
    assert policy.admit(new, running)  # comes to 39 tokens
    new.expected = 51  # 13 pages and a round-up, of 12
    assert not policy.admit(new, running)


@pytest.mark.parametrize("seed", range(3))
def test_peak_pages_against_every_step(seed):
    """At most a page a sequence above what a simulation step by step finds."""
    rng = np.random.default_rng(seed)
    for _ in range(50):
        spans = [(now, now + int(rng.integers(1, 40))) for now in rng.integers(1, 60, rng.integers(1, 9)).tolist()]
        most = 0
        for step in range(1, 41):
            held = [now + step for now, end in spans if now + step <= end]
            most = max(most, sum(-(-tokens // P) for tokens in held))
        assert most <= peak_pages(*zip(*spans), P) < most + len(spans) + 1


def test_an_extent_is_a_run_of_the_predicted_length():
    pool = RunPool(32, P)
    policy = Extent(Fixed(10)).over(pool)
    a = seq(6, 100)
    assert policy.admit(a, [])
    assert a.pages == [0, 1, 2, 3]  # 6 + 10 - 1 tokens of KV
    few = seq(6, 9)
    assert policy.admit(few, [a])
    assert few.pages == [4, 5]  # never longer than max_length


def full(pool, policy, expected=10):
    """A sequence that has filled its extent of pages 0 .. 3."""
    a = seq(6, 100)
    assert policy.admit(a, [])
    a.computed = a.expected = 16
    assert a.pages == [0, 1, 2, 3]
    return a


@pytest.mark.parametrize("overflow", ["move", "scatter"])
def test_an_outgrown_extent_goes_on_right_behind_if_it_can(overflow):
    pool = RunPool(32, P)
    policy = Extent(Fixed(10), overflow=overflow).over(pool)
    a = full(pool, policy)
    assert policy.grow(a, 1, 0, 99) == []
    assert a.pages == list(range(7))
    assert a.expected == 27  # and one that is computed before the end is read


def test_a_sequence_that_wants_more_than_was_expected_is_counted():
    """Expected to come to 8 tokens of KV, two pages; then to 12, which it does."""
    loop = Loop(Limits(1, 8, 8, 1, P, 8, 8), partial(Scheduler, policy=Extent(Fixed(4))))
    loop.add(4, new_tokens=9)
    loop.run()
    assert loop.scheduler.counts.outgrown == 1


def test_an_outgrown_extent_moves_or_is_scattered():
    for overflow in ("move", "scatter"):
        pool = RunPool(16, P)
        policy = Extent(Fixed(10), overflow=overflow).over(pool)
        a = full(pool, policy)
        assert pool.extend(3, 2) == [4, 5]
        copies = policy.grow(a, 1, 0, 99)
        if overflow == "move":
            assert copies == [(0, 6), (1, 7), (2, 8), (3, 9)]
            assert a.pages == list(range(6, 13))
            assert pool.refcount(0) == 1, "freed though an unread step may write it"
        else:
            assert copies == []
            assert a.pages == [0, 1, 2, 3, 6, 7, 8]


def test_a_move_needs_room_in_the_page_table_and_spares_others():
    for room, spare in ((6, 0), (99, 6)):
        pool = RunPool(16, P)
        policy = Extent(Fixed(10), overflow="move").over(pool)
        a = full(pool, policy)
        pool.extend(3, 1)
        assert policy.grow(a, 1, spare, room) == []
        assert a.pages[:4] == [0, 1, 2, 3]
        assert len(a.pages) > 4
        assert pool.num_free >= spare


def test_no_run_is_left_but_pages_are():
    pool = RunPool(8, P)
    policy = Extent(Fixed(10)).over(pool)
    pool.allocate(8)
    pool.free([0, 2, 4, 6])
    a = seq(6, 100)
    assert not policy.admit(a, [])
    a.pages, a.computed = [1], 4
    assert policy.grow(a, 1, 0, 99) == []
    assert len(a.pages) == 2


def test_the_victim_is_the_cheapest_that_frees_enough_and_never_the_oldest():
    pool = PagePool(40, P)
    policy = OnDemand().over(pool)
    sizes = [1, 30, 9, 12, 9]
    running = [seq(n, 60, computed=n, pages=pool.allocate(-(-n // P)), arrival=i) for i, n in enumerate(sizes)]
    assert policy.victim(running, 1) is running[4]  # of equals the newest
    assert policy.victim(running, 4) is running[1]
    assert policy.victim(running, 30) is running[1]  # none frees enough: the one that frees most
    assert policy.victim(running[:1], 1) is running[0]
    pool.share(running[2].pages + running[4].pages)  # what others hold as well frees nothing
    assert policy.victim(running, 1) is running[3]
    running[3].cached = 8  # and what is found again is not recomputed
    pool.free(running[2].pages)
    assert policy.victim(running, 1) is running[3]


def simulate(policy, pages=300, slots=32, requests=400) -> Scheduler:
    """Requests of geometric lengths, each known by its seed, all at once; read one step late."""
    scheduler = Scheduler(Limits(slots, 96, 64, 8, P, pages, 2 * slots + 24), policy=policy)
    rng = np.random.default_rng(0)
    for i in range(requests):
        prompt, output = int(rng.integers(1, 60)), min(200, int(rng.geometric(0.02)))
        params = SamplingParams(max_new_tokens=200, seed=output)
        scheduler.add(Sequence(i, 0, (1,) * prompt, params, 0, prompt + 200))
    before = None
    while not scheduler.idle:
        plan = scheduler.schedule()
        if before is not None:
            for s in [*before.decodes, *(c.seq for c in before.chunks if c.final)]:
                scheduler.on_tokens(s, [1])
                if not s.finished and len(s.output) == s.params.seed:
                    scheduler.finish(s, "stop" if len(s.output) < 200 else "length")
            scheduler.step_read(before.step)
        before = plan
    assert scheduler.pool.num_free == pages
    return scheduler


def truth(prompt, params) -> int:
    return params.seed


@pytest.fixture(scope="module")
def runs() -> Callable[..., Scheduler]:
    """simulate, each policy once."""
    done: dict[tuple, Scheduler] = {}
    predictors = {"oracle": lambda: Oracle(truth), "quantile": Quantile, "longest": Longest}
    kinds = {"paged": Predicted, "extent": Extent}

    def run(name, predictor=None, **options):
        key = (name, predictor, *options.items())
        if key not in done:
            policy = kinds[name](predictors[predictor](), **options) if predictor else policy_of(name)
            done[key] = simulate(policy)
        return done[key]

    return run


def test_predictions_prevent_preemption(runs):
    assert runs("paged").counts.preempted > 20
    for name in (("reserve",), ("paged", "longest"), ("extent", "longest")):
        assert runs(*name).counts.preempted == 0
    assert runs("paged", "oracle").counts.preempted <= 1  # prompts in chunks may delay an end that was counted on
    assert runs("extent", "oracle").counts.preempted == 0
    assert runs("extent", "oracle").counts.outgrown == 0
    assert runs("paged", "quantile").counts.preempted < runs("paged").counts.preempted / 4


def test_knowing_the_lengths_holds_more_requests_than_reserving_the_longest(runs):
    steps = {name: runs(*name).counts.steps for name in [("reserve",), ("extent", "oracle"), ("paged", "oracle")]}
    assert steps["paged", "oracle"] < steps["extent", "oracle"] < 0.75 * steps["reserve",]
    waste = [runs(*name).counts.empty_steps / runs(*name).counts.page_steps / P for name in steps]
    assert waste[0] > waste[1] > waste[2]
    assert waste[2] < 0.15  # half a page a sequence


def test_the_share_that_outgrows_its_extent_is_below_the_stated_one(runs):
    for q in (0.5, 0.8):
        counts = runs("extent", "quantile", quantile=q).counts
        assert counts.outgrown > 0
        first = counts.outgrown / counts.admitted  # each again counts again: the mean of a geometric series
        assert first < (1 - q) / q * 1.15
