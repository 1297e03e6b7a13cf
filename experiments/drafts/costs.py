"""Claims about what verifying drafts costs: by the nodes of a tree, and by batch."""

import argparse
import statistics
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import jax

from experiments.drafts.imposed import VerifyingTimer, imposed, verifying_step
from experiments.drafts.tree_pass import PAGE, binary
from experiments.drafts.workloads import read_stories
from experiments.steps.timer import StepTimer, compile_ahead, pool_for, step_of
from jllm.batch import Bucket
from jllm.engine.drafters import find_drafter
from jllm.engine.engine import Engine
from jllm.engine.request import SamplingParams
from jllm.pretrained import load

Row = dict[str, Any]
DRAFTS = 4
CONTEXT = 128  # tokens before a tree
CHEAP = 1.25  # times a plain step, that a tree may take and still count as cheap


def node_costs(args: argparse.Namespace) -> Iterator[Row]:
    """A step of one sequence with a tree of that many nodes, of which none is accepted, against a plain step: in turn,
    the medians of --repeats."""
    model = load(args.model)
    params, config = model.params, model.config
    pool = pool_for(1, CONTEXT + args.steps + max(args.nodes), PAGE, None)
    shapes = {nodes: binary(nodes) for nodes in args.nodes}
    timers: dict[int, StepTimer] = {1: StepTimer(params, config, pool, args.backend)}
    for nodes, tree in shapes.items():
        timers[nodes] = VerifyingTimer(params, config, pool, args.backend, drafter=imposed(tree, 0))
    packed = {1: step_of("decode", 1)} | {nodes: verifying_step(1, tree) for nodes, tree in shapes.items()}
    steps = compile_ahead({n: partial(timer.lower, packed[n][0]) for n, timer in timers.items()}, 4)
    buffers = {nodes: [jax.device_put(packed[nodes][1])] * args.steps for nodes in timers}
    seconds: dict[int, list[float]] = {nodes: [] for nodes in timers}
    for nodes, timer in timers.items():
        timer.renew()
        timer.place(CONTEXT)
        timer.seconds(steps[nodes].result(), buffers[nodes], 1)
    for _ in range(args.repeats):
        for nodes, timer in timers.items():
            seconds[nodes].append(timer.seconds(steps[nodes].result(), buffers[nodes], 1) / args.steps)
    ratios = {nodes: [mine / plain for mine, plain in zip(seconds[nodes], seconds[1])] for nodes in timers}
    for nodes in timers:
        depth = shapes[nodes].depth if nodes in shapes else 0
        row: Row = {"nodes": nodes, "depth": depth, "step_ms": round(1e3 * statistics.median(seconds[nodes]), 4)}
        yield row | {"over_plain": round(statistics.median(ratios[nodes]), 4)}


def judge_nodes(rows: list[Row]) -> tuple[str, str]:
    cheap = max(row["nodes"] for row in rows if row["over_plain"] <= CHEAP)
    last = rows[-1]
    said = f"{last['nodes']} nodes take {last['over_plain']:.2f} plain steps; up to {cheap} at most {CHEAP:g}"
    return ("yes" if cheap >= 16 else "partly" if cheap > 2 else "no"), said


def batches(args: argparse.Namespace) -> Iterator[Row]:
    """Tokens a second of as many stories at once, without drafts, with the model's own drafter always, and where it
    pays; in turn, the median of --repeats."""
    model = load(args.model)
    prompts = read_stories(model, max(args.batch))
    model = replace(model, tokenizer=None)
    drafter = find_drafter(args.drafter, model, DRAFTS)
    choices: dict[str, Row] = {
        "none": {},
        "fixed": {"speculate": drafter, "drafts": DRAFTS},
        "automatic": {"speculate": drafter},
    }
    asked = SamplingParams(temperature=0.0, max_new_tokens=args.tokens, ignore_eos=True)
    for batch in args.batch:
        some = prompts[:batch]
        total = sum(map(len, some))
        sizes: dict[str, Any] = {"max_slots": batch, "max_step_tokens": total + batch * (DRAFTS + 1)}
        sizes["buckets"] = (Bucket(batch, 0, 0), Bucket(batch, total, batch))
        engines = {
            name: Engine(model, prefix_cache=False, backend=args.backend, **sizes, **more)
            for name, more in choices.items()
        }
        seconds: dict[str, list[float]] = {name: [] for name in engines}
        for engine in engines.values():
            together(engine, some, asked)
        for _ in range(args.repeats):
            for name, engine in engines.items():
                seconds[name].append(together(engine, some, asked))
        middle = {name: statistics.median(found) for name, found in seconds.items()}
        for name, engine in engines.items():
            row = {"batch": batch, "drafter": args.drafter, "choice": name}
            row["tokens_s"] = round(batch * args.tokens / middle[name], 1)
            yield row | {"times": round(middle["none"] / middle[name], 4)}
            engine.close()


def together(engine: Engine, prompts: Sequence[list[int]], sampling: SamplingParams) -> float:
    """Seconds of all prompts at once."""
    start = time.perf_counter()
    for prompt in prompts:
        engine.submit(prompt, sampling)
    for _ in engine.run():
        pass
    return time.perf_counter() - start


def judge_batches(rows: list[Row]) -> tuple[str, str]:
    fixed = {row["batch"]: row["times"] for row in rows if row["choice"] == "fixed"}
    first, last = min(fixed), max(fixed)
    said = ", ".join(f"{times:.2f} times at batch {batch}" for batch, times in fixed.items())
    verdict = "yes" if fixed[first] > 1 > fixed[last] else "partly" if fixed[last] < fixed[first] else "no"
    return verdict, f"always drafting: {said}"
