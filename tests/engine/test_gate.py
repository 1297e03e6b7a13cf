"""Requests whose steps are not compiled: they wait while others run, and get the tokens that they would get alone."""

import threading

import pytest

from jllm.engine.adapters import OVERTAKES, Places
from jllm.engine.engine import Engine
from jllm.engine.gate import Gate
from jllm.engine.request import SamplingParams
from jllm.engine.scheduler import Scheduler
from jllm.engine.sequence import Sequence
from jllm.programs.compiler import Compiler, Recipe
from jllm.programs.packed_step import FORWARD, SAMPLE, WHOLE_STEP
from jllm.programs.programs import Programs
from jllm.programs.sizes import EngineSizes, Limits
from jllm.programs.step_shapes import StepShapes
from jllm.step.buckets import Bucket
from jllm.step.state import Variant
from tests.tiny import CONFIG, greedy, serve, tiny_model

OPTIONS = {"max_slots": 2, "page_size": 8, "max_step_tokens": 8, "buckets": (Bucket(2, 6, 2),)}
PLAIN, LOGPROBS, PENALTIES, BOTH = (
    Variant(), Variant(logprobs=True), Variant(penalties=True), Variant(penalties=True, logprobs=True)
)  # fmt: skip
GUIDED = Variant(guided=True)
ASKS = {"logprobs": 2, "presence_penalty": 0.5, "prompt_logprobs": True}


def test_what_covers_what():
    assert LOGPROBS | PENALTIES == BOTH
    assert BOTH.covers(BOTH)
    assert BOTH.covers(LOGPROBS)
    assert LOGPROBS.covers(PLAIN)
    assert not LOGPROBS.covers(BOTH)
    assert not PENALTIES.covers(LOGPROBS)
    assert not BOTH.covers(Variant(taps=("norm",)))
    assert [v.breadth for v in (PLAIN, LOGPROBS, BOTH)] == [0, 1, 2]


# The gate alone


class FakePrograms:
    """Serves what it is told that it has, and notes what is to be prepared."""

    def __init__(self, *there: Variant, ahead: bool = True):
        self.there, self.asked, self.failures = set(there), [], {}
        self.ahead, self.compiling, self.in_step = ahead, False, False

    def serves(self, variant: Variant) -> bool:
        return any(v.covers(variant) for v in self.there)

    def permit(self, variant: Variant) -> None:
        self.there.add(variant)

    def prepare(self, variant: Variant) -> None:
        self.asked.append(variant)

    def take_failures(self):
        return self.failures


def make_gate(*there: Variant, ahead: bool = True) -> Gate:
    limits = Limits(4, 16, 12, 4, page_size=8, num_pages=32, max_deltas=16)
    return Gate(FakePrograms(*there, ahead=ahead), Scheduler(limits), Places(None, 0))


def newcomer(gate: Gate, id: int, origin: Sequence | None = None, **asks) -> Sequence:
    seq = Sequence(id, 0, (1, 2, 3), SamplingParams(**asks), 0, 20, origin=origin)
    seq.adapter = gate._places.of(seq.params)
    gate.add(seq)
    return seq


def inside(gate: Gate) -> list[int]:
    return [seq.request_id for seq in gate._scheduler.waiting]


def test_who_waits_is_overtaken_and_then_takes_its_place():
    gate = make_gate(PLAIN)
    newcomer(gate, 0)
    newcomer(gate, 1, logprobs=1)
    newcomer(gate, 2)
    newcomer(gate, 3, presence_penalty=1.0)
    newcomer(gate, 4)
    assert inside(gate) == [0, 2, 4]
    assert gate.open() == []
    assert gate._programs.asked == [LOGPROBS, BOTH]  # for the one, then for both at once
    gate._programs.there.add(LOGPROBS)
    gate.open()
    assert inside(gate) == [0, 1, 2, 4]
    gate._programs.there.add(PENALTIES)
    gate.open()
    assert [seq.request_id for seq in gate.waiting] == [3]  # beside 1 its steps would have to do both
    assert set(gate._programs.asked) == {LOGPROBS, BOTH}, "and nothing that it could not run with"
    gate._programs.there.add(BOTH)
    gate.open()
    assert inside(gate) == [0, 1, 2, 3, 4]
    assert gate.inside == BOTH


def test_who_waits_long_is_in_the_log_once(monkeypatch, caplog):
    caplog.set_level("INFO", "jllm")
    monkeypatch.setattr("jllm.engine.gate.SLOW", 60.0)
    gate = make_gate(PLAIN)
    newcomer(gate, 0, logprobs=1)
    gate.open()
    assert not caplog.records
    monkeypatch.setattr("jllm.engine.gate.SLOW", 0.0)
    gate.open()
    newcomer(gate, 1, logprobs=1)
    gate.open()
    gate._programs.there.add(LOGPROBS)
    gate.open()
    first, second = (record.getMessage() for record in caplog.records)
    assert first == "requests (logprobs) wait until their steps are compiled; others go on"
    assert second.startswith("the steps that requests waited for are compiled, after ")


class NoDevice:
    """Takes adapters of any value."""

    def put_adapter(self, place, value) -> None:
        pass


def adapted_gate() -> Gate:
    """Two places, for four adapters."""
    gate = make_gate(PLAIN | Variant(adapters=True))
    gate._places = Places(NoDevice(), 2)
    for name in "abcd":
        gate._places.load(name, {})
    return gate


def test_who_waits_for_a_place_gets_one_though_others_keep_coming():
    gate = adapted_gate()
    running = {name: newcomer(gate, i, adapter=name) for i, name in enumerate("ab")}
    starved, after, turns = newcomer(gate, 2, adapter="c"), newcomer(gate, 3, adapter="d"), 0
    assert list(gate.waiting) == [starved, after]
    for id in range(4, 4 + 6 * OVERTAKES, 2):  # each is there before the one of its adapter before it ends
        gate.open()
        turns += starved in gate.waiting
        for name, more in zip("ab", (0, 1)):
            ending, running[name] = running[name], newcomer(gate, id + more, adapter=name)
            gate.open()
            if ending not in gate.waiting:
                gate.finish(ending, "stop")
        newcomer(gate, 1000 + id)
        assert id + 1000 in inside(gate), "without an adapter nobody waits"
    assert turns <= OVERTAKES
    assert starved not in gate.waiting
    waiting_on = {seq.params.adapter for seq in gate.waiting}
    gate.finish(starved, "stop")
    gate.open()
    assert after not in gate.waiting, "the next one gets the place, before those who came later"
    assert waiting_on <= {"a", "b", "d"}


def test_the_place_of_its_own_adapter_is_promised_to_nobody():
    """A later request gave the adapter this place, before the first one was asked again."""
    gate = adapted_gate()
    ending, _ = newcomer(gate, 0, adapter="a"), newcomer(gate, 1, adapter="b")
    waiting = newcomer(gate, 2, adapter="c")
    for id in range(3, 1 + OVERTAKES):
        newcomer(gate, id, adapter="b")
    gate.finish(ending, "stop")
    later = [newcomer(gate, 100, adapter="c"), newcomer(gate, 101, adapter="b")]
    assert not gate.waiting.keys() & set(later)
    gate.open()
    assert waiting not in gate.waiting


def test_an_adapter_that_could_not_be_written_takes_no_place(monkeypatch):
    gate = adapted_gate()
    first, second = newcomer(gate, 0, adapter="a"), newcomer(gate, 1, adapter="b")
    waiting = newcomer(gate, 2, adapter="c")

    def fail(*_):
        raise MemoryError

    gate.finish(first, "stop")
    gate.finish(second, "stop")
    with monkeypatch.context() as broken:
        broken.setattr(NoDevice, "put_adapter", fail)
        with pytest.raises(MemoryError):
            gate.open()
        with pytest.raises(MemoryError):
            newcomer(gate, 3, adapter="d")
    assert list(gate.waiting) == [waiting]
    gate._places.unload("d")
    gate.open()
    newcomer(gate, 4, adapter="b")
    assert (inside(gate), gate.inside) == ([2, 4], PLAIN | Variant(adapters=True))


def test_what_continues_a_sample_inside_waits_for_no_place():
    gate = adapted_gate()
    first, _ = newcomer(gate, 0, adapter="a"), newcomer(gate, 1, adapter="b")
    waiting = newcomer(gate, 2, adapter="c")
    for id in range(3, 3 + OVERTAKES):
        newcomer(gate, id, adapter="b")
    another, fork = newcomer(gate, 100, adapter="a"), newcomer(gate, 0, first, adapter="a")
    assert list(gate.waiting) == [waiting, another]
    gate.finish(first, "stop")
    gate.open()
    assert list(gate.waiting) == [waiting, another]
    gate.finish(fork, "stop")
    gate.open()
    assert list(gate.waiting) == [another]


def test_what_is_inside_counts_until_it_ends():
    gate = make_gate(PLAIN, LOGPROBS, PENALTIES)
    one, two = newcomer(gate, 0, logprobs=0), newcomer(gate, 1, logprobs=0)
    three = newcomer(gate, 2, logit_bias={3: 1.0})
    for seq in (one, two):
        assert gate.inside == LOGPROBS
        gate.open()
        assert list(gate.waiting) == [three]
        gate.finish(seq, "stop")
    assert gate.inside == PLAIN
    gate.open()
    assert (inside(gate), gate.inside) == ([2], PENALTIES)


def test_many_that_ask_for_the_same_are_looked_at_once_a_step(monkeypatch):
    """Hundreds may wait for seconds, while others' steps take 20 ms."""
    gate, looks = make_gate(PLAIN), []
    for id in range(6):
        newcomer(gate, id, **({"logprobs": 1} if id % 2 else {"presence_penalty": 1.0}))
    serves = gate._programs.serves
    monkeypatch.setattr(gate._programs, "serves", lambda variant: looks.append(variant) or serves(variant))
    assert gate.open() == []
    assert looks == [PENALTIES, LOGPROBS]
    assert gate._programs.asked == [PENALTIES, BOTH]
    gate._programs.there.add(BOTH)
    assert gate.open() == []
    assert (inside(gate), list(gate.waiting)) == ([0, 1, 2, 3, 4, 5], [])


def test_who_waits_may_end():
    gate = make_gate(PLAIN)
    seq = newcomer(gate, 0, logprobs=1)
    gate.finish(seq, "abort")
    assert (seq.finish_reason, list(gate.waiting), gate.inside) == ("abort", [], PLAIN)


def test_a_failure_is_told_to_those_who_asked():
    gate = make_gate(PLAIN)
    one, two = newcomer(gate, 0, logprobs=1), newcomer(gate, 1, prompt_logprobs=True)
    gate._programs.failures = {LOGPROBS: ValueError("no")}
    ((seq, error),) = gate.open()
    assert seq is one
    assert str(error) == "no"
    gate.finish(one, "error")
    assert list(gate.waiting) == [two]
    assert gate._programs.asked == [Variant(prompt_logprobs=True)], "not with what goes"


def test_a_failure_of_two_together_is_not_told_to_one_that_was_asked_for_alone():
    gate = make_gate(PLAIN)
    newcomer(gate, 0, logprobs=1)
    two = newcomer(gate, 1, presence_penalty=1.0)
    newcomer(gate, 2, logprobs=3)
    gate._programs.failures = {BOTH: ValueError("no")}
    assert [seq for seq, _ in gate.open()] == [two]
    assert gate._programs.asked == [LOGPROBS]


@pytest.mark.parametrize("busy", ["a sequence runs", "programs are compiled", "all was compiled ahead", None])
def test_only_where_none_is_delayed_steps_wait_for_the_compiler(busy):
    gate = make_gate(PLAIN, ahead=busy == "all was compiled ahead")
    gate._programs.compiling = busy == "programs are compiled"
    if busy == "a sequence runs":
        newcomer(gate, 0)
        gate._scheduler.schedule()
    newcomer(gate, 1, logprobs=1)
    assert bool(gate.waiting) == (busy is not None)
    assert (LOGPROBS in gate._programs.there) == (busy is None)


def test_what_runs_between_steps_and_cannot_be_compiled_ends_who_asked(engine, monkeypatch):
    def broken():
        raise ValueError("the compiler fell over")

    behind, opened = Compiler._behind, threading.Event()

    def held(compiler, recipe, settings):
        return behind(compiler, recipe, settings) if recipe.name == "masks" else opened.wait(60)

    monkeypatch.setattr(Compiler, "_behind", held)
    monkeypatch.setattr(StepShapes, "masking", lambda shapes, variant: [Recipe(broken, name="masks")])
    asking = engine.submit([9, 8], greedy(3, logprobs=0))
    with pytest.warns(UserWarning, match=r"could not be compiled \(ValueError: the compiler fell over\)"):
        done = run(engine, lambda done: done)
    opened.set()
    assert done[asking, 0].finish_reason == "error"


# Which program a step takes


SMALL, MIDDLE, TOP = Bucket(1, 0, 0), Bucket(4, 0, 0), Bucket(4, 12, 4)


@pytest.fixture
def programs(monkeypatch) -> Programs:
    """With all sizes of two variants, and the largest of a third; nothing is really compiled."""
    limits = Limits(4, 16, 12, 4, page_size=8, num_pages=32, max_deltas=16)
    programs = Programs(StepShapes(CONFIG, EngineSizes(limits, 32, (SMALL, MIDDLE, TOP)), None, None))
    programs._open = {PLAIN, PENALTIES, BOTH}
    programs._made = {(bucket, v, WHOLE_STEP) for bucket in (SMALL, MIDDLE, TOP) for v in (PLAIN, PENALTIES)}
    programs._made.add((TOP, BOTH, WHOLE_STEP))
    programs.asked = []
    monkeypatch.setattr(programs, "_begin", lambda *step: programs.asked.append(step))
    return programs


def test_a_step_takes_the_narrowest_variant_and_the_smallest_size_that_are_there(programs):
    assert programs.choose(PLAIN, 1, 0, 0) == (SMALL, PLAIN)
    assert programs.choose(PENALTIES, 2, 0, 0) == (MIDDLE, PENALTIES)
    assert programs.choose(PLAIN, 1, 5, 1) == (TOP, PLAIN)
    assert not programs.asked
    assert programs.choose(LOGPROBS, 2, 0, 0) == (TOP, BOTH)
    assert programs.asked == [(MIDDLE, BOTH)]
    assert not programs.serves(Variant(prompt_logprobs=True))
    programs._made.add((MIDDLE, BOTH, WHOLE_STEP))
    assert programs.choose(LOGPROBS, 2, 0, 0) == (MIDDLE, BOTH)


def test_a_guided_step_needs_both_of_its_halves(programs):
    programs._open = {PLAIN, GUIDED}
    programs._made |= {(TOP, GUIDED, part) for part in (FORWARD, SAMPLE)} | {(MIDDLE, GUIDED, FORWARD)}
    assert programs.choose(GUIDED, 2, 0, 0) == (TOP, GUIDED)
    assert programs.asked == [(MIDDLE, GUIDED)]
    programs._made.add((MIDDLE, GUIDED, SAMPLE))
    assert programs.choose(GUIDED, 2, 0, 0) == (MIDDLE, GUIDED)
    assert programs.choose(PLAIN, 2, 0, 0) == (MIDDLE, PLAIN)


def test_a_step_waits_for_what_it_may_wait_for(programs):
    tapped = Variant(taps=("norm",))
    assert programs.choose(tapped, 1, 0, 0) == (SMALL, tapped)  # since nothing covers it
    assert programs.choose(Variant(prompt_logprobs=True), 1, 0, 0) == (SMALL, PLAIN)  # it scores no prompt
    programs.permit(LOGPROBS)
    assert programs.choose(LOGPROBS, 2, 0, 0) == (MIDDLE, LOGPROBS)
    assert not programs.asked


def test_a_step_without_a_prompt_has_all_of_a_variant_but_the_scores_of_prompts(programs):
    wide = LOGPROBS | Variant(prompt_logprobs=True)
    programs.permit(wide)
    assert programs.choose(wide, 1, 0, 0) == (SMALL, LOGPROBS)
    assert programs.choose(wide, 1, 5, 1) == (TOP, wide)
    assert not programs.asked


def test_in_step_programs_nothing_depends_on_what_is_there(programs):
    """As several processes must, of which each has a compiler of its own."""
    programs.in_step = True
    programs.permit(LOGPROBS)
    for there in (
        set(),
        {(TOP, BOTH, WHOLE_STEP)},
        {(b, v, WHOLE_STEP) for b in (SMALL, TOP) for v in (LOGPROBS, BOTH)},
    ):
        programs._made = there
        assert programs.choose(LOGPROBS, 2, 0, 0) == (MIDDLE, LOGPROBS)
        assert programs.choose(Variant(prompt_logprobs=True), 1, 5, 1) == (TOP, Variant(prompt_logprobs=True))
    assert not programs.asked


# Engines


class Threads:
    """Holds back what threads compile until it is opened; raises the error instead, if it is given one."""

    def __init__(self, monkeypatch):
        self.opened, self.error = threading.Event(), None
        behind = Compiler._behind

        def held(compiler, recipe, settings):
            assert self.opened.wait(60)
            if self.error is not None:
                raise self.error
            return behind(compiler, recipe, settings)

        monkeypatch.setattr(Compiler, "_behind", held)


@pytest.fixture(scope="module")
def model():
    return tiny_model(num_layers=1)


@pytest.fixture
def engine(model):
    """With all that plain requests need compiled ahead."""
    engine = Engine(model, **OPTIONS)
    engine.compile_ahead()
    yield engine
    engine.close()


@pytest.fixture
def threads(engine, monkeypatch):
    """Of that engine, once it is there."""
    held = Threads(monkeypatch)
    yield held
    held.opened.set()


def run(engine: Engine, until) -> dict:
    """Completions by id and sample, of steps until something is the case."""
    done = {}
    while not until(done):
        done |= {(e.id, e.sample): e.completion for e in engine.step() if e.completion}
    return done


@pytest.mark.parametrize(
    "asks", [{name: value} for name, value in ASKS.items()] + [ASKS], ids=lambda asks: "+".join(asks)
)
def test_others_run_while_a_newcomer_waits(model, engine, threads, asks):
    prompts, samplings = [[5, 6, 7], [9, 8], [4, 4, 4, 4]], [greedy(12), greedy(5, **asks), greedy(7)]
    first = engine.submit(prompts[0], samplings[0])
    run(engine, lambda _: engine.metrics()["output_tokens"] > 1)
    second, third = engine.submit(prompts[1], samplings[1]), engine.submit(prompts[2], samplings[2])
    done = run(engine, lambda done: len(done) == 2)
    assert engine.metrics()["waiting"] == 1
    assert not engine.step()
    threads.opened.set()
    done |= run(engine, lambda done: done)
    m = engine.metrics()
    assert (m["waiting"], m["compile_first_use"], m["compile_programs"]) == (0, 0, 3)
    for id, prompt, sampling in zip((first, second, third), prompts, samplings):
        (want,) = serve(model, [prompt], [sampling], **OPTIONS)
        assert done[id, 0].token_ids == want.token_ids
        assert done[id, 0].prompt_logprobs == (want.prompt_logprobs and pytest.approx(want.prompt_logprobs))
        assert bool(done[id, 0].logprobs) == bool(want.logprobs)


def test_a_wider_program_gives_the_same_tokens(model):
    engine = Engine(model, **OPTIONS)
    engine.compile_ahead([SamplingParams(**ASKS)])
    prompts, samplings = [[5, 6, 7], [9, 8]], [greedy(12), greedy(5, presence_penalty=0.5)]
    ids = [engine.submit(p, s) for p, s in zip(prompts, samplings)]
    done = run(engine, lambda done: len(done) == 2)
    wants = serve(model, prompts, samplings, **OPTIONS)
    assert [done[i, 0].token_ids for i in ids] == [want.token_ids for want in wants]
    assert engine.metrics()["compiled_steps"] == 1
    assert engine.metrics()["compile_first_use"] == 0


def test_who_waits_can_be_forked_and_aborted(model, engine, threads):
    running = engine.submit([5, 6, 7], greedy(30))
    waiting, other = (engine.submit([9, 8], greedy(3, logprobs=0)) for _ in range(2))
    engine.step()
    assert engine.fork(waiting) == 1
    assert engine.snapshot(waiting).length == 0
    engine.abort(waiting)
    engine.abort(running)
    done = run(engine, lambda done: len(done) == 3)
    assert {c.finish_reason for c in done.values()} == {"abort"}
    threads.opened.set()
    (key,) = run(engine, lambda done: done)
    assert key == (other, 0)
    assert not engine.has_work


def test_a_failure_to_compile_ends_who_asked_and_no_other(engine, threads):
    threads.error = ValueError("the compiler fell over\nand more")
    threads.opened.set()
    plain, asking = engine.submit([5, 6, 7], greedy(20)), engine.submit([9, 8], greedy(3, logprobs=0, n=2))
    with pytest.warns(
        UserWarning, match=r"request 1 ends: .* could not be compiled \(ValueError: the compiler fell over\)"
    ):
        done = run(engine, lambda done: len(done) == 3)
    assert {key: c.finish_reason for key, c in done.items()} == {
        (plain, 0): "length", (asking, 0): "error", (asking, 1): "error"
    }  # fmt: skip
    threads.error = None
    again = engine.submit([9, 8], greedy(3, logprobs=0))
    assert run(engine, lambda done: done)[again, 0].finish_reason == "length"


def test_where_nothing_was_compiled_ahead_only_a_lone_step_waits_for_the_compiler(model, monkeypatch):
    threads = Threads(monkeypatch)
    engine = Engine(model, **OPTIONS)
    first = engine.submit([5, 6, 7], greedy(9))
    run(engine, lambda _: engine.metrics()["output_tokens"])
    assert engine.metrics()["compile_first_use"] == 1
    second = engine.submit([9, 8], greedy(3, logprobs=0))
    assert (first, 0) in run(engine, lambda done: done)
    assert engine.metrics()["waiting"] == 1
    threads.opened.set()
    assert (second, 0) in run(engine, lambda done: done)
    third = engine.submit([9, 8], greedy(3, presence_penalty=0.5))
    assert (third, 0) in run(engine, lambda done: done)
    m = engine.metrics()
    assert (m["compile_programs"], m["compile_first_use"]) == (3, 2)


def test_processes_take_the_same_programs_however_slow_the_compiler_of_one_is(model, monkeypatch):
    """Two engines in place of two processes: threads of the one compile nothing until all has run."""
    monkeypatch.setattr("jllm.programs.programs.has_processes", lambda config: True)
    sizes = OPTIONS | {"num_pages": 20, "buckets": (Bucket(2, 6, 2), Bucket(2, 0, 0), Bucket(1, 0, 0))}
    taken = []
    for held in (False, True):
        engine, keys, done = Engine(model, **sizes), [], {}
        engine.compile_ahead(wait=held)
        threads = Threads(monkeypatch)
        if not held:
            threads.opened.set()
        programs, take = engine._device.programs, engine._device.programs.run
        noted = lambda key, *rest, keys=keys, take=take: keys.append(key) or take(key, *rest)  # noqa: E731
        monkeypatch.setattr(programs, "run", noted)
        for asks in ({}, {"logprobs": 1}, {"presence_penalty": 0.5}, {}):
            engine.submit([5, 6, 7], greedy(9, **asks))
            for _ in range(4 if len(done) < 1 else 40):
                done |= {event.id: event.completion.token_ids for event in engine.step() if event.completion}
        taken.append((keys, done))
        threads.opened.set()
        engine.close()
    assert taken[0] == taken[1]
    assert {variant for _, variant, _ in taken[0][0]} == {PLAIN, LOGPROBS, BOTH}
    assert len(taken[0][1]) == 4
