"""Runs a workload through an engine once, as its requests arrive."""

import argparse
import time
from collections import Counter, deque
from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np

from experiments.serving.engines import sampling_of
from experiments.serving.workload import Request, Row, Served, repeat_row
from experiments.steps.words import ENDLESS, is_guided
from jllm.distributed.replicas import Replicas
from jllm.engine.engine import Engine
from jllm.engine.request import SamplingParams


def serve(
    engine: Engine | Replicas,
    requests: Sequence[Request],
    sampling: SamplingParams,
    seed: int,
    allow: int = 0,
    guided: float = 0,
    midway: Callable[[], object] | None = None,
) -> tuple[list[Served], float]:
    """Sends requests as they arrive. Returns each one's times, and the seconds until the last one ended. A request that
    allows more tokens than it wants is aborted once it has them. A share of the requests is guided, with the same
    lengths. Calls `midway` once half of the requests have ended."""
    rng = np.random.default_rng(seed)
    prompts = [rng.integers(3, engine.vocab_size, r.prompt).tolist() for r in requests]
    params = [
        SamplingParams(**{**vars(sampling), "max_new_tokens": max(allow, r.output), "seed": i})
        for i, r in enumerate(requests)
    ]
    params = [replace(p, guide=ENDLESS, ignore_eos=False) if is_guided(i, guided) else p for i, p in enumerate(params)]
    coming, known, served = deque(range(len(requests))), {}, []
    made: Counter[int] = Counter()
    start = time.perf_counter()
    while coming or engine.has_work:
        now = time.perf_counter() - start
        while coming and requests[coming[0]].arrival <= now:
            i = coming.popleft()
            delay = time.perf_counter() - start - requests[i].arrival
            known[engine.submit(prompts[i], params[i])] = (requests[i], delay)
        if not engine.has_work:
            time.sleep(max(0.0, requests[coming[0]].arrival - (time.perf_counter() - start)))
            continue
        for event in engine.step():
            made[event.id] += len(event.token_ids)
            if event.completion is None:
                if made[event.id] == known[event.id][0].output:
                    engine.abort(event.id)
            else:
                request, delay = known.pop(event.id)
                t, reason = event.completion.timings, event.completion.finish_reason
                del made[event.id]
                if t.output_tokens != request.output or t.first_token is None:
                    raise RuntimeError(f"a request made {t.output_tokens} of {request.output} tokens ({reason})")
                served.append(Served(request, t.first_token + delay, t.total + delay))
                if midway is not None and len(served) == max(1, len(requests) // 2):
                    midway()
    return served, time.perf_counter() - start


def warm_up(engine: Engine | Replicas, requests: Sequence[Request], args: argparse.Namespace) -> int:
    """Serves the first --warmup requests, with a few tokens each. Returns their number."""
    warm = [Request(r.prompt, min(r.output, 16), 0.0) for r in requests[: args.warmup]]
    if warm:
        serve(engine, warm, sampling_of(args), args.seed, guided=args.guided or 0.0)
    return len(warm)


def run_once(
    engine: Engine | Replicas,
    requests: Sequence[Request],
    args: argparse.Namespace,
    midway: Callable[[], object] | None = None,
) -> tuple[Row, float]:
    """Returns the measures of one run of the workload, and the seconds that this thread was busy."""
    engine.reset_metrics()
    engine.reset_prefix_cache()  # each run has the same prompts
    busy = time.thread_time()
    how = args.seed, args.allow, args.guided or 0.0, midway
    served, seconds = serve(engine, requests, sampling_of(args), *how)
    return repeat_row(served, seconds, engine.metrics(), args.cut), time.thread_time() - busy
