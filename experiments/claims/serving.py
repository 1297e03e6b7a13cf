"""Holds what claims about requests per second share: the QPS workload, which runs through one engine after the other.

Claims of one command share the model, its compiled steps, and runs under the same settings. Compiling takes a minute
before the first engine, and serving half a minute in each. So there is one repeat.
"""

import argparse
import math
import sys
from dataclasses import replace
from functools import cache
from typing import Any

import numpy as np

from experiments.claims.claim import Row
from experiments.claims.shapes import config_of, random_params
from experiments.qps import measure, parse_args
from experiments.serving.workload import WORKLOAD, Request, read_workload
from jllm.model.model import Model
from jllm.quant.quantize import quantize

KEPT = (
    "requests", "qps", "qps_ci", "output_tokens_s", "ttft_ms_p50", "ttft_ms_p99", "itl_ms_p50", "itl_ms_p99",
    "e2e_ms_p50", "e2e_ms_p99", "good_share", "goodput", "slack", "steps", "preemptions", "repeats",
)  # fmt: skip
TOY_LENGTHS = ((5, 9), (3, 2), (7, 4), (2, 12))


@cache
def make_model(toy: bool) -> Model:
    config = config_of(toy)
    return Model(config, random_params(config, toy), None)


def workload(
    toy: bool, count: int | None = None, rate: float | None = None, seconds: float | None = None
) -> list[Request]:
    """Returns the first `count` requests, or those that arrive within some seconds at a rate, drawn with
    replacement."""
    if toy:
        gap = 0.0 if rate is None else 1 / rate
        return [Request(p, o, i * gap) for i, (p, o) in enumerate(TOY_LENGTHS)]
    if seconds is None:
        return read_workload(WORKLOAD, count, rate, seed=0)
    if rate is None:
        raise ValueError("requests that arrive in some seconds need a rate")
    known, rng = read_workload(WORKLOAD, None, None, seed=0), np.random.default_rng(0)
    at = np.cumsum(rng.exponential(1 / rate, math.ceil(2 * seconds * rate) + 100))
    return [replace(known[rng.integers(len(known))], arrival=float(t)) for t in at[at < seconds]]


def settings(toy: bool, **changes: Any) -> argparse.Namespace:
    """Returns options of experiments.qps: the workload's own, or smaller ones for a toy."""
    args = parse_args(["--repeats", "1", "--config", "llama-2-7b"])
    if toy:
        small = {"slots": 2, "num_pages": 16, "max_step_tokens": 8, "warmup": 0, "dtype": "float32"}
        args = argparse.Namespace(**{**vars(args), **small})
    return argparse.Namespace(**{**vars(args), **changes})


def served(toy: bool, count: int | None = None, seconds: float | None = None, **changes: Any) -> Row:
    """Returns the mean over the repeats of the first `count` requests, or of some seconds of arrivals. Settings are
    those of experiments.qps. A command serves the same settings only once."""
    plain = vars(settings(toy))
    return _served(toy, count, seconds, tuple(sorted((k, v) for k, v in changes.items() if plain[k] != v)))


@cache
def _served(toy: bool, count: int | None, seconds: float | None, changes: tuple[tuple[str, Any], ...]) -> Row:
    args = settings(toy, **dict(changes))
    print(f"serving {dict(changes)}", file=sys.stderr, flush=True)
    model = make_model(toy)
    if args.quantize:  # not kept: the next one needs the memory
        model = replace(model, params=quantize(model.params, args.quantize))
    *_, mean = measure(model, workload(toy, count, args.rate, seconds), args)
    return {key: mean[key] for key in KEPT if key in mean}
