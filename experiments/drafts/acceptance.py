"""Measures how often drafts are accepted, by drafter, workload and temperature, and the effect on a document's time."""

import argparse
import itertools
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np
from tqdm import tqdm

from experiments.arguments import check_backend
from experiments.drafts.workloads import WORKLOADS
from experiments.result_file import bar
from jllm.engine.drafters import find_drafter
from jllm.engine.engine import Engine
from jllm.engine.request import SamplingParams
from jllm.errors import ConfigError
from jllm.files.load import load
from jllm.model.model import Model
from jllm.step.buckets import Bucket

Row = dict[str, Any]
DRAFTERS = {"ngram": 7, "draft": 4, "medusa": 4, "eagle": 4}  # with the drafts of a fixed chain
LEAST_TIMES, LEAST_AUTOMATIC = 1.8, 0.98
DRAFTS = 4
PLAIN, AGAIN = "none", "none, again"
WARM = 8  # tokens before the clock starts


@dataclass(frozen=True)
class Served:
    """The result of one document in one engine, alone."""

    seconds: float
    cpu_seconds: float  # of all threads of this process
    tokens: tuple[int, ...]
    segments: int  # steps that verified drafts
    advanced: float  # tokens of these steps
    accepted: Mapping[int, float]  # by depth: share of steps with such a draft that accepted it


def serve(engine: Engine, prompt: Sequence[int], sampling: SamplingParams) -> Served:
    """Returns the result of one request, from its submission to its last token."""
    engine.reset_metrics()
    start, cpu = time.perf_counter(), time.process_time()
    engine.submit(list(prompt), sampling)
    found = [event.completion for event in engine.run() if event.completion is not None]
    seconds, cpu = time.perf_counter() - start, time.process_time() - cpu
    metrics = engine.metrics()
    segments = metrics.get("draft_segments", 0)
    advanced = segments * (metrics.get("draft_tokens_mean") or 0)
    return Served(seconds, cpu, found[0].token_ids, segments, advanced, metrics.get("draft_acceptance", {}))


def interval(documents: Sequence[Any], figure: Callable[[Sequence[Any]], float], samples: int = 1000) -> list[float]:
    """Returns the 95 % bootstrap interval of a measure over documents (Efron, 1979), with a fixed seed."""
    drawn = np.random.default_rng(0).integers(len(documents), size=(samples, len(documents)))
    found = [figure([documents[i] for i in draw]) for draw in drawn]
    return [round(float(x), 4) for x in np.quantile(found, [0.025, 0.975])]


def acceptance(served: Sequence[Served], depth: int) -> float:
    """Returns the mean over documents."""
    return statistics.fmean(each.accepted[depth] for each in served)


def tokens_a_step(served: Sequence[Served]) -> float:
    """Returns the tokens per step that verified drafts, or per any step if none did."""
    segments = sum(each.segments for each in served)
    return sum(each.advanced for each in served) / segments if segments else 1.0


def summary(served: Sequence[Served], plain: Sequence[Served]) -> Row:
    """Returns the summary of an engine's documents, beside an engine without drafts. A time is a document's own."""
    ratios = [theirs.seconds / mine.seconds for mine, theirs in zip(served, plain, strict=True)]
    work = [theirs.cpu_seconds / mine.cpu_seconds for mine, theirs in zip(served, plain, strict=True)]
    found: Row = {"documents": len(served)}
    if any(each.segments for each in served):
        found |= {"tokens_a_step": round(tokens_a_step(served), 4), "tokens_a_step_95": interval(served, tokens_a_step)}
    return found | {
        "tokens_s": round(sum(len(each.tokens) for each in served) / sum(each.seconds for each in served), 1),
        "times": round(statistics.median(ratios), 4),
        "times_95": interval(ratios, statistics.median),
        "cpu_times": round(statistics.median(work), 4),
        "same_tokens": sum(mine.tokens == theirs.tokens for mine, theirs in zip(served, plain)),
    }


def depths(served: Sequence[Served]) -> Iterator[Row]:
    """Yields a row for each drafted depth."""
    for depth in sorted({depth for each in served for depth in each.accepted}):
        some = [each for each in served if depth in each.accepted]
        yield {
            "depth": depth,
            "documents": len(some),
            "acceptance": round(acceptance(some, depth), 4),
            "acceptance_95": interval(some, partial(acceptance, depth=depth)),
        }


def make_engines(
    model: Model, drafters: Sequence[str], drafts: int | None, options: Mapping[str, Any]
) -> dict[tuple[str, str], Engine]:
    """Returns engines by drafter and choice: one always drafts, and one drafts if it pays. An engine without drafts
    comes twice, since their difference is noise. Raises ConfigError for a drafter that does not fit the model."""
    found: dict[tuple[str, str], Row] = {}
    for name in drafters:
        k = drafts or DRAFTERS.get(name.partition(":")[0], DRAFTS)
        found[name, "fixed"] = {"speculate": find_drafter(name, model, k), "drafts": k}
        found[name, "automatic"] = {"speculate": find_drafter(name, model)}
    plain = Engine(model, prefix_cache=False, **options)
    drafting = {key: Engine(model, prefix_cache=False, **options, **more) for key, more in found.items()}
    return {(PLAIN, ""): plain, (AGAIN, ""): plain} | drafting


def rows(args: argparse.Namespace) -> Iterator[Row]:
    """Yields rows of each workload, temperature and engine. Engines take turns at each document, so that other load
    affects all alike."""
    check_backend(args.backend)
    model = load(args.model)
    if model.tokenizer is None:
        raise ConfigError(f"{args.model}: has no tokenizer to read the workloads with")
    prompts = {name: WORKLOADS[name](model.tokenizer, args.documents) for name in args.workloads}
    tokens = max(map(len, itertools.chain(*prompts.values())))
    buckets = (Bucket(1, 0, 0), Bucket(1, tokens, 1))
    options = {"max_slots": 1, "max_step_tokens": tokens + 1, "buckets": buckets, "backend": args.backend}
    engines = make_engines(replace(model, tokenizer=None), args.drafters, args.drafts, options)
    if tokens + max(args.tokens) > model.config.context:
        raise ConfigError(
            f"--tokens {' '.join(map(str, args.tokens))} after prompts of up to {tokens}: "
            f"the model's context is {model.config.context}"
        )
    for engine in tqdm(engines.values(), desc="compiling", unit="engine"):
        engine.compile_ahead()
        serve(engine, prompts[args.workloads[0]][0], SamplingParams(max_new_tokens=WARM, ignore_eos=True))
    cases = list(itertools.product(args.workloads, args.temperatures))
    with tqdm(total=len(cases) * args.documents * len(engines), unit="document") as progress:
        for workload, temperature in cases:
            served: dict[tuple[str, str], list[Served]] = {key: [] for key in engines}
            for i, prompt in enumerate(prompts[workload]):
                sampling = SamplingParams(
                    temperature=temperature,
                    seed=i,
                    max_new_tokens=args.tokens[workload == "repetitive"],
                    ignore_eos=True,
                )
                turn = i % len(engines)
                for key in [*list(engines)[turn:], *list(engines)[:turn]]:
                    served[key].append(serve(engines[key], prompt, sampling))
                    progress.update()
            for (drafter, choice), found in served.items():
                about: Row = {"workload": workload, "temperature": temperature, "drafter": drafter, "choice": choice}
                yield about | summary(found, served[PLAIN, ""])
                if choice == "fixed":
                    yield from (about | row for row in depths(found))
    for engine in engines.values():
        engine.close()


def bars(rows: Sequence[Row]) -> Iterator[Row]:
    """Yields bars: cases in which drafts must gain, and in which they must not lose."""
    timed = [row for row in rows if "times" in row]
    for row in timed:
        where = row["workload"], row["temperature"], row["drafter"], row["choice"]
        if where == ("repetitive", 0.0, "ngram", "fixed"):
            yield bar("ngram, repetitive, temperature 0: times as fast as plain", row["times"], "1", LEAST_TIMES)
    noise = max((abs(1 - row["times"]) for row in timed if row["drafter"] == AGAIN), default=0.0)
    for workload in dict.fromkeys(row["workload"] for row in timed):
        found = [row["times"] for row in timed if row["workload"] == workload and row["choice"] == "automatic"]
        if found:
            name = (
                f"automatic choice, {workload}, the slowest of {len(found)} (plain against itself: up to {noise:.1%})"
            )
            yield bar(f"{name}: times as fast as plain", min(found), "1", LEAST_AUTOMATIC)
