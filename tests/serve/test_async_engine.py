"""AsyncEngine: many tasks, those that are cancelled, ends and failures; nothing hangs, and no page is left behind."""

import asyncio
import random

import jax
import jax.numpy as jnp
import pytest

from jllm.engine.engine import Engine
from jllm.errors import EngineClosed, EngineNotReady, QueueFull, RequestError, TokenizerError
from jllm.serve.async_engine import AsyncEngine
from jllm.step.buckets import Bucket
from tests.tiny import greedy, serve, tiny_model

OPTIONS = {"max_slots": 4, "page_size": 8, "max_step_tokens": 16, "buckets": (Bucket(4, 16, 4),)}
PROMPT = [5, 6, 7]


@pytest.fixture(scope="module")
def model():
    return tiny_model(num_layers=1)


def run(work, model, *, grace: float = 60.0, **limits):
    """What `work` returns of an AsyncEngine, which is closed after it; the engine's metrics before that."""

    async def main():
        engine = AsyncEngine(Engine(model, **OPTIONS), **limits)
        try:
            async with asyncio.timeout(120):
                return await work(engine)
        finally:
            await engine.close(grace)

    return asyncio.run(main())


async def completions(stream) -> list:
    return [event.completion async for event in stream if event.completion]


async def settled(engine) -> dict:
    """Metrics once nothing runs."""
    while engine.unfinished or engine._engine.has_work:
        await asyncio.sleep(0.01)
    return engine.metrics()


def test_each_task_gets_its_own_events(model):
    prompts = [[3 + i, 5] for i in range(24)]

    async def one(engine, prompt):
        tokens, stream = [], await engine.submit(prompt, greedy(9))
        async for event in stream:
            tokens += event.token_ids
        assert stream.ended
        assert tuple(tokens) == event.completion.token_ids
        return event.completion.token_ids

    async def work(engine):
        return await asyncio.gather(*(one(engine, prompt) for prompt in prompts))

    want = [c.token_ids for c in serve(model, prompts, [greedy(9)] * 24, **OPTIONS)]
    assert run(work, model) == want


def test_samples_end_one_by_one(model):
    async def work(engine):
        return await completions(await engine.submit(PROMPT, greedy(5, n=3)))

    assert [len(c.token_ids) for c in run(work, model)] == [5, 5, 5]


def test_what_is_cancelled_or_left_frees_its_pages(model):
    """At any moment: before it is taken in, while it waits, runs, or ends."""
    draw = random.Random(3)

    async def one(engine, how):
        sampling = greedy(draw.choice([1, 4, 60]), n=draw.choice([1, 1, 3]))
        if how == "cancel":
            task = asyncio.create_task(completions(await engine.submit(PROMPT, sampling)))
            await asyncio.sleep(draw.random() * 0.02)
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
        elif how == "leave":
            async with await engine.submit(PROMPT, greedy(60)) as stream:
                await anext(stream)
            with pytest.raises(EngineClosed, match="this stream was closed"):
                await anext(stream)
        else:
            async with await engine.submit(PROMPT, sampling) as stream:
                assert [c.finish_reason for c in await completions(stream)] == ["length"] * sampling.n

    async def work(engine):
        await asyncio.gather(*(one(engine, draw.choice(["cancel", "leave", "stay"])) for _ in range(150)))
        return await settled(engine)

    metrics = run(work, model, max_waiting=1000)
    assert (metrics["pages_used"], metrics["waiting"], metrics["running"]) == (0, 0, 0)
    assert metrics["requests_aborted"] > 20
    assert metrics["requests_finished"] > 20


def test_a_deadline_and_abort_keep_what_there_was(model):
    async def work(engine):
        late = await engine.submit(PROMPT, greedy(120), deadline=0.0)
        aborted = await engine.submit(PROMPT, greedy(120))
        await anext(aborted)
        aborted.abort()
        in_time = await engine.submit(PROMPT, greedy(2), deadline=3600.0)
        return [(await completions(stream))[0].finish_reason for stream in (late, aborted, in_time)]

    assert run(work, model) == ["deadline", "abort", "length"]


def test_a_full_queue_refuses_all_of_a_request_or_nothing(model):
    async def work(engine):
        first = await engine.submit(PROMPT, greedy(100, n=5))
        with pytest.raises(QueueFull, match="5 samples run or wait, of at most 6: try again later"):
            engine.submit_all([(PROMPT, greedy(2)), (PROMPT, greedy(2))])
        assert engine.unfinished == 5
        with pytest.raises(RequestError, match="7 samples at once are too many: at most 6 may run and wait"):
            await engine.submit(PROMPT, greedy(2, n=7))
        last = await engine.submit(PROMPT, greedy(2))
        assert len(await completions(last)) == 1
        first.close()
        await settled(engine)
        return engine.unfinished

    assert run(work, model, max_waiting=2) == 0


def test_bad_requests_raise_where_they_are_submitted(model):
    async def work(engine):
        with pytest.raises(RequestError, match="the prompt is empty"):
            await engine.submit([], greedy(2))
        unchecked = engine.submit_all([(PROMPT, greedy(100)), ([999], greedy(2)), (PROMPT, greedy(2))])
        with pytest.raises(RequestError, match="token id 999"):
            await anext(unchecked)
        return await settled(engine)

    metrics = run(work, model)
    assert (metrics["requests"], metrics["requests_aborted"], metrics["pages_used"]) == (1, 1, 0)


def test_requests_that_come_together_share_a_stream(model):
    prompts, samplings = [[5, 6], [7], [8, 9]], [greedy(3, n=2), greedy(30), greedy(4)]

    async def work(engine):
        stream, found = engine.submit_all(zip(prompts, samplings)), {}
        while events := await stream.take():
            found |= {(event.id, event.sample): event.completion.token_ids for event in events if event.completion}
        assert not engine._ids
        assert not engine._requests
        return found

    found = run(work, model)
    assert found.keys() == {(0, 0), (0, 1), (1, 0), (2, 0)}
    want = serve(model, prompts, [greedy(3), greedy(30), greedy(4)], **OPTIONS)
    assert [found[i, 0] for i in range(3)] == [completion.token_ids for completion in want]


def test_a_stream_of_ends_alone(model):
    """Beside one of all events; what ends is the same."""

    async def work(engine):
        asked = [(PROMPT, greedy(6, n=2)), ([7], greedy(3))]
        whole, ends = engine.submit_all(asked), engine.submit_all(asked, ends_only=True)
        found = [[event async for event in stream] for stream in (whole, ends)]
        one = [event async for event in await engine.submit(PROMPT, greedy(6), ends_only=True)]
        return *found, one

    whole, ends, one = run(work, model)

    def by_sample(events):
        return {(e.id, e.sample): e.completion.token_ids for e in events if e.completion}

    assert len(whole) > 3
    assert [bool(event.completion) for event in ends + one] == [True] * 4
    assert by_sample(ends) == by_sample(whole)
    assert one[0].completion.token_ids == by_sample(whole)[0, 0]


def test_close_reports_what_it_cuts_and_ends_it(model):
    async def work(engine):
        streams = [await engine.submit(PROMPT, greedy(tokens)) for tokens in (2, 120, 120)]
        await completions(streams[0])
        await anext(streams[1])
        cut = await engine.close()
        with pytest.raises(EngineClosed):
            await engine.submit(PROMPT, greedy(2))
        with pytest.raises(EngineClosed, match="it was closed"):
            engine.submit_all([(PROMPT, greedy(2))])
        assert engine.unfinished == 0
        return cut, [(await completions(stream))[0].finish_reason for stream in streams[1:]]

    assert run(work, model) == (2, ["abort", "abort"])


def test_close_waits_for_what_runs(model):
    async def work(engine):
        stream = await engine.submit(PROMPT, greedy(40))
        assert await engine.close(60.0) == 0
        return (await completions(stream))[0].finish_reason

    assert run(work, model) == "length"


def test_streams_wait_while_the_engine_sleeps_or_lacks_its_weights(model):
    async def work(engine):
        inner = engine._engine
        stream = await engine.submit(PROMPT, greedy(40))
        await anext(stream)
        inner.sleep()
        asleep = await engine.submit(PROMPT, greedy(2))
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(completions(asleep), 0.3)
        asleep = await engine.submit(PROMPT, greedy(2))
        inner.wake()
        await completions(asleep)
        donated = jax.tree.map(jnp.array, model.params)
        await asyncio.to_thread(engine.update, donated)
        jax.tree.map(lambda x: x.delete(), donated)
        later = await engine.submit(PROMPT, greedy(2))
        with pytest.raises(EngineNotReady):
            inner._device.check_ready()
        await asyncio.sleep(0.3)
        assert engine.refused is None
        await asyncio.to_thread(engine.update, model.params)
        return [(await completions(each))[0].finish_reason for each in (stream, later)]

    assert run(work, model) == ["length", "length"]


def test_a_failing_engine_tells_all_who_wait(model):
    async def work(engine):
        def fail(*args):
            raise ZeroDivisionError("the step\nbroke")

        engine._engine._device.run = fail
        streams = [engine.submit_all([(PROMPT, greedy(9))]) for _ in range(8)]
        found = await asyncio.gather(*(anext(stream) for stream in streams), return_exceptions=True)
        assert {type(error) for error in found} == {EngineClosed}
        assert {str(error) for error in found} == {"this engine takes no more work: ZeroDivisionError: the step"}
        assert engine.unfinished == 0
        assert all(isinstance(error.__cause__, ZeroDivisionError) for error in found)
        with pytest.raises(EngineClosed):
            await engine.submit(PROMPT, greedy(2))
        return await engine.close()

    assert run(work, model) == 0


def test_what_had_ended_before_a_failure_arrives(model):
    """One ends while the other's step fails; the first's end is in what the engine had not returned yet."""

    async def work(engine):
        loop, reasons = engine._engine._loop, []
        read, end = loop.read, loop.ledger.end

        def reads(flight):
            read(flight)
            if "length" in reasons:
                raise ZeroDivisionError("the step broke")

        loop.read = reads
        loop.ledger.end = lambda seq, reason, *rest: reasons.append(reason) or end(seq, reason, *rest)
        short, long = engine.submit_all([(PROMPT, greedy(3))]), engine.submit_all([(PROMPT, greedy(30))])
        ended, failed = await asyncio.gather(completions(short), completions(long), return_exceptions=True)
        assert [len(each.token_ids) for each in ended] == [3]
        assert isinstance(failed, EngineClosed)

    run(work, model)


def test_all_who_wait_are_told_though_closing_fails_too(model):
    async def work(engine):
        def fail(*args):
            raise ZeroDivisionError("the step broke")

        def fail_too(*args):
            raise KeyError("closing broke")

        engine._engine._device.run, engine._engine._loop.close = fail, fail_too
        with pytest.raises(EngineClosed, match="the step broke|closing broke"):
            await anext(engine.submit_all([(PROMPT, greedy(9))]))
        assert engine.unfinished == 0
        return await engine.close()

    assert run(work, model) == 0


@pytest.mark.parametrize("where", ["close", "last_events"])
def test_a_close_that_fails_ends_who_waits_and_who_closes(model, monkeypatch, where):
    async def work(engine):
        def fail(*args):
            raise ZeroDivisionError("closing broke")

        stream = await engine.submit(PROMPT, greedy(100))
        await anext(stream)
        monkeypatch.setattr(Engine, where, property(fail) if where == "last_events" else fail)
        closing = asyncio.ensure_future(engine.close())
        with pytest.raises(EngineClosed, match="closing broke"):
            await completions(stream)
        monkeypatch.undo()
        await closing

    run(work, model)


@pytest.mark.parametrize("error", [TokenizerError("it cannot be encoded"), ZeroDivisionError("nobody expects this")])
def test_another_error_of_a_request_ends_that_request_alone(model, monkeypatch, error):
    async def work(engine):
        def fail(*args, **more):
            raise error

        with monkeypatch.context() as patch:
            patch.setattr(engine._engine, "submit", fail)
            stream = engine.submit_all([(PROMPT, greedy(3))])
            while not stream.ended:
                await asyncio.sleep(0.001)
        with pytest.raises(type(error)):
            await completions(stream)
        (done,) = await completions(await engine.submit(PROMPT, greedy(3)))
        return done.finish_reason

    assert run(work, model) == "length"
