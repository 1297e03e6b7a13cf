"""Tests C19: the shares of tokenizing, computing, sampling and returning in prefill and decode.

Each part is timed alone. Prompts of the bundled text pass through its tokenizer of 4,096 tokens. A step of LLaMA-2-7B
counts without its sampler. The sampler draws as many rows by top-k and top-p. `return` is the host loop's work per step
on a device that takes no time: planning, packing, reading tokens, detokenizing, events. Shares are of the parts' sum.

In the engine the parts overlap. `overlapped` rows come from the newest trace of `python -m experiments.step_profile
--kind serve`. They have the sampler's kernels, all other kernels, and the device's waiting time, which is the visible
part of the host's work. Without a GPU, the parts alone come from this claim's newest file that has them.
"""

import statistics
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import jax
import numpy as np

import jllm
from experiments.claims.c4 import sampler_inputs
from experiments.claims.c22 import Step
from experiments.claims.claim import RESULTS, Answer, Claim, Row, in_all, in_most, measured_rows, microseconds, percents
from experiments.claims.recorded import newest, source_of
from experiments.claims.shapes import config_of, random_params
from experiments.serving.engines import HostOnly
from experiments.steps.timer import decode_steps
from experiments.texts.read import BUNDLED_TEXT, read_documents
from jllm.engine.engine import Engine
from jllm.engine.request import SamplingParams
from jllm.files.tokenizer import Tokenizer
from jllm.model.model import Model
from jllm.model.params import Params
from jllm.model.sampling import sample
from jllm.step.state import Outputs
from pallas_kernels.backends import on_hopper

PREFILL, DECODE = (1024,), (1, 256)  # tokens of one prompt; sequences
CONTEXT = 256
STEPS = 4
PARTS = ("tokenize", "compute", "sample", "return")
STATED = {  # the share of each part, from and to
    "prefill": {"tokenize": (0.10, 0.10), "compute": (0.80, 0.80), "sample": (0.10, 0.10), "return": (0.02, 0.05)},
    "decode": {"compute": (0.80, 0.80), "sample": (0.10, 0.10), "return": (0.05, 0.05)},
}
NEAR = 0.25  # relative distance from the stated share that counts as near


class Talking(HostOnly):
    """A device that takes no time, and returns tokens with text."""

    vocabulary = 4000

    def run(self, buffer, layout, variant) -> Outputs:
        outputs = super().run(buffer, layout, variant)
        tokens = np.random.default_rng(len(buffer)).integers(300, self.vocabulary, len(outputs.tokens), np.int32)
        return Outputs(tokens, None, None, None, None)  # type: ignore[arg-type]


def measure(toy: bool) -> Iterator[Row]:
    yield from alone(toy) if toy or on_hopper() else recorded(RESULTS)
    if not toy:
        yield from overlapped(RESULTS)


def recorded(results: Path) -> Iterator[Row]:
    """Yields the parts alone from this claim's newest file on a GPU."""
    for document, file in newest(results, "claims-C19")[-1:]:
        yield from (row | source_of(document, file) for row in measured_rows(document) if "how" not in row)


def overlapped(results: Path) -> Iterator[Row]:
    """Yields the shares of a serving engine's step, from its newest trace."""
    for document, file in newest(results, "step_profile_serve")[-1:]:
        rows = [row for row in document["rows"] if row.get("kernel") in ("(all)", "(none)")]
        for batch, context in dict.fromkeys((row["batch"], row["context"]) for row in rows):
            share = {row["kind"]: row["share"] for row in rows if row["batch"] == batch}
            sampled, waited = share.get("sampling", 0.0), share["gap"]
            row = {"phase": "decode", "batch": batch, "tokens": context, "how": "overlapped"}
            parts = {"compute": round(1 - sampled - waited, 4), "sample": sampled, "return": waited}
            yield row | parts | source_of(document, file)


def alone(toy: bool) -> Iterator[Row]:
    """Yields the time of each part alone."""
    config = config_of(toy)
    params, tokenizer = random_params(config, toy), jllm.load().tokenizer
    assert tokenizer is not None
    host = Model(config, jax.eval_shape(lambda: params), tokenizer)
    for tokens in (24,) if toy else PREFILL:
        step = Step(params, config, tokens, False, config.num_layers).microseconds()
        parts = [tokenize_us(tokenizer, tokens), step, sample_us(params, 1), host_us(host, 1, tokens, toy)]
        yield row_of("prefill", 1, tokens, parts)
    for batch in (2,) if toy else DECODE:
        context = 16 if toy else CONTEXT
        step = microseconds(decode_steps(params, config, batch, context, STEPS)) / STEPS
        parts = [0.0, step, sample_us(params, batch), host_us(host, batch, 0, toy)]
        yield row_of("decode", batch, context, parts)


def row_of(phase: str, batch: int, tokens: int, parts: list[float]) -> Row:
    """Returns a row of the microseconds of tokenizing, the whole step, its sampler, and the host's loop."""
    tokenize, step, sampler, host = parts
    us = (tokenize, max(0.0, step - sampler), sampler, host)
    row: Row = {"phase": phase, "batch": batch, "tokens": tokens}
    row |= {f"{name}_us": round(value, 1) for name, value in zip(PARTS, us)}
    return row | {name: round(value / sum(us), 4) for name, value in zip(PARTS, us)}


def tokenize_us(tokenizer: Tokenizer, tokens: int) -> float:
    """Returns the median microseconds, of nine, to tokenize a text of `tokens` tokens."""
    ids = tokenizer.encode(" ".join(read_documents(BUNDLED_TEXT)))[:tokens]
    text = tokenizer.decode(ids)
    return _median_us(lambda: tokenizer.encode(text))


def sample_us(params: Params, rows: int) -> float:
    vocabulary = (params.embed if params.head is None else params.head).shape[0]
    return microseconds(partial(jax.jit(sample), *sampler_inputs(rows, vocabulary)))


def host_us(model: Model, batch: int, prompt: int, toy: bool) -> float:
    """Returns the engine loop's median microseconds on a device that takes no time. It is for a step that decodes
    `batch` sequences, or for all steps of a prompt until its first token."""
    output, length = (1 if prompt else 8 if toy else 64), prompt or 8
    pages = 2 * batch * -(-(length + output) // 16) + batch
    engine = Engine(model, device=Talking, max_slots=batch, num_pages=pages, max_step_tokens=max(2 * batch, length + 1))
    sampling = [SamplingParams(max_new_tokens=output, ignore_eos=True, seed=seed) for seed in range(batch)]
    rng = np.random.default_rng(0)
    times: list[float] = []
    for _ in range(9 if prompt else 1):
        for its in sampling:
            engine.submit(rng.integers(3, engine.vocab_size, length).tolist(), its)
        steps = []
        while engine.has_work:
            full = engine.metrics()["running"] == batch
            start = time.perf_counter()
            engine.step()
            if full or prompt:
                steps.append(1e6 * (time.perf_counter() - start))
        times += [sum(steps)] if prompt else steps
    engine.close()
    return statistics.median(times)


def _median_us(call: Any) -> float:
    times = []
    for _ in range(9):
        start = time.perf_counter()
        call()
        times.append(1e6 * (time.perf_counter() - start))
    return statistics.median(times)


def near(row: Row) -> Iterator[bool]:
    """Yields whether each part's share is near the stated one."""
    for name, (low, high) in STATED[row["phase"]].items():
        if name in row:
            yield low * (1 - NEAR) <= row[name] <= high * (1 + NEAR)


def holds(rows: list[Row]) -> Answer:
    """Decides case by case. Computing must take the larger part, and each part as much as stated."""
    return in_most(row["compute"] > 0.5 for row in rows), in_all(side for row in rows for side in near(row))


def words(rows: list[Row]) -> tuple[str, str]:
    compute, drawn, back = (percents(row[name] for row in rows) for name in ("compute", "sample", "return"))
    line = f"Computing takes {compute} of the work, sampling {drawn}, and returning {back}."
    return f"{compute} computing, {drawn} sampling", line


CLAIM = Claim(
    id="C19",
    stated="prefill 10/80/10/2-5 %, decode -/80/10/5 %",
    measure=measure,
    holds=holds,
    words=words,
    computed=True,
)
