"""Tests C4: sampling on the device without a sort vs. sampling that sorts each row.

The workload, sampled by top-k and top-p, runs through one engine with either sampler (contest.py). Without a GPU, its
rows come from this claim's newest file. Rows of the samplers alone, by rows and vocabulary, come from the newest file
of `python -m pallas_kernels.sample.bench`: our kernel, the same in plain jnp, and the sorting one.
"""

from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path

import jax
import jax.numpy as jnp

from experiments.claims.claim import RESULTS, Answer, Claim, Row, measured_rows, microseconds, spread
from experiments.claims.contest import SAMPLING, contest, gain_holds, gain_of, gain_words
from experiments.claims.recorded import newest, source_of
from jllm.model.sampling import Sampling, neutral_sampling, sample, sample_reference
from pallas_kernels.backends import on_hopper

ASKED = "top-k, top-p"
STATED = (0.10, 0.20)  # growth of requests per second, from and to
TOY_SHAPES = ((1, 256), (4, 256))  # rows, vocabulary


def measure(toy: bool) -> Iterator[Row]:
    if toy or on_hopper():
        yield from contest(toy, {"threshold": "usual", "sort": "sorting"})
    else:
        yield from recorded(RESULTS)
    yield from (alone(*shape) for shape in TOY_SHAPES) if toy else samplers(RESULTS)


def recorded(results: Path) -> Iterator[Row]:
    """Yields the served rows from this claim's newest file on a GPU."""
    for document, file in newest(results, "claims-C4")[-1:]:
        yield from (row | source_of(document, file) for row in measured_rows(document) if "policy" in row)


def samplers(results: Path) -> Iterator[Row]:
    """Yields the microseconds of each sampler alone, from the newest file that has them."""
    for document, file in newest(results, "sample")[-1:]:
        found: dict[tuple[int, int], Row] = {}
        for row in document["rows"]:
            if row.get("asked") == ASKED and "us" in row:
                found.setdefault((row["R"], row["V"]), {})[row["peer"]] = row["us"]
        for (rows, vocabulary), us in found.items():
            if {"mosaic", "xla", "sort"} <= us.keys():
                row = {"rows": rows, "V": vocabulary, "threshold_us": us["mosaic"], "plain_us": us["xla"]}
                yield row | {"sort_us": us["sort"], "times": round(us["sort"] / us["mosaic"], 2),
                             "plain_times": round(us["sort"] / us["xla"], 2), **source_of(document, file)}  # fmt: skip


def sampler_inputs(rows: int, vocabulary: int) -> tuple[jax.Array, Sampling, jax.Array]:
    """Returns logits, parameters and positions of a step of `rows` rows, sampled by top-k and top-p."""

    def full(value: float, dtype=jnp.float32) -> jax.Array:
        return jnp.full(rows, value, dtype)

    logits = 3 * jax.random.normal(jax.random.key(0), (rows, vocabulary), jnp.float32)
    params = replace(
        jax.tree.map(jnp.asarray, neutral_sampling(rows)),
        temperature=full(SAMPLING["temperature"]),
        top_k=full(SAMPLING["top_k"], jnp.int32),
        top_p=full(SAMPLING["top_p"]),
        seed=jnp.arange(rows, dtype=jnp.uint32),
    )
    return logits, params, full(7, jnp.int32)


def alone(rows: int, vocabulary: int) -> Row:
    """Returns the times of both samplers for a step of `rows` rows."""
    arguments = sampler_inputs(rows, vocabulary)
    ours, sorted_ = jax.jit(lambda *rows: sample(*rows)[0]), jax.jit(sample_reference)
    same = float(jnp.mean(ours(*arguments) == sorted_(*arguments)))
    row: Row = {"rows": rows, "V": vocabulary, "same_tokens": same}
    if same < 0.99:  # rounding may break ties differently
        return row | {"error": f"only {same:.1%} of the tokens are the same"}
    us = [microseconds(partial(draw, *arguments)) for draw in (ours, sorted_)]
    return row | {"threshold_us": round(us[0], 2), "sort_us": round(us[1], 2), "times": round(us[1] / us[0], 2)}


def holds(rows: list[Row]) -> Answer:
    return gain_holds(gain_of(rows, "threshold", "sort"), *STATED)


def words(rows: list[Row]) -> tuple[str, str]:
    gain = gain_of(rows, "threshold", "sort")
    measured, line = gain_words("Sampling without a sort", gain, *STATED)
    if gain is None or not (alone := [row["times"] for row in rows if "times" in row]):
        return measured, line
    return f"{100 * gain.mean:+.1f} % requests a second; alone {spread(alone, '{:.1f}')} times as fast", line


CLAIM = Claim(
    id="C4",
    stated="+10 to +20 % requests a second",
    measure=measure,
    holds=holds,
    words=words,
    serves=True,
    computed=True,
    alternates=True,
)
