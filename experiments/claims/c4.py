"""C4: sampling on the device without a sort against sampling that sorts each row.

The first 512 requests of the QPS workload, all sent at once, sampled by top-k and top-p, through the same engine with
either sampler; and the two samplers alone, by rows and vocabulary.
"""

from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from experiments.claims.claim import Claim, Row, Verdict, microseconds
from experiments.claims.serving import contest, draw_qps, gain_of
from jllm.sampling import Sampling, neutral_sampling, sample, sample_reference

SAMPLING: dict[str, Any] = {"temperature": 0.8, "top_k": 50, "top_p": 0.9}
SHAPES = ((64, 32000), (512, 32000), (64, 128256), (512, 128256))  # rows, vocabulary
REQUESTS = 512  # as many as slots: half of the workload tells as much of a sampler
TOY_SHAPES = ((4, 256),)


def measure(toy: bool) -> Iterator[Row]:
    for rows, vocabulary in TOY_SHAPES if toy else SHAPES:
        yield alone(rows, vocabulary)
    policies = {"threshold": {"sampling": "threshold"}, "sort": {"sampling": "sort"}}
    yield from contest(toy, policies, count=REQUESTS, **SAMPLING)


def sampler_inputs(rows: int, vocabulary: int) -> tuple[jax.Array, Sampling, jax.Array]:
    """Logits, parameters and positions of a step of `rows` rows, sampled by top-k and top-p."""

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
    """Microseconds of either sampler for a step of `rows` rows."""
    arguments = sampler_inputs(rows, vocabulary)
    ours, sorted_ = jax.jit(lambda *rows: sample(*rows)[0]), jax.jit(sample_reference)
    same = float(jnp.mean(ours(*arguments) == sorted_(*arguments)))
    row: Row = {"rows": rows, "V": vocabulary, "same_tokens": same}
    if same < 0.99:  # ties of rounding aside
        return row | {"error": f"only {same:.1%} of the tokens are the same"}
    us = [microseconds(partial(draw, *arguments)) for draw in (ours, sorted_)]
    return row | {"threshold_us": round(us[0], 2), "sort_us": round(us[1], 2), "times": round(us[1] / us[0], 2)}


def judge(rows: list[Row]) -> Verdict:
    found = gain_of(rows, "threshold", "sort", least=0.10)
    times = [row["times"] for row in rows if "times" in row]
    alone = f"; the sampler alone is {min(times):g} to {max(times):g} times as fast" if times else ""
    return Verdict(found.verdict, found.measured + alone)


def draw(figure: Any, rows: list[Row]) -> None:
    left, right = figure.subplots(1, 2)
    draw_qps(left, rows)
    found = [row for row in rows if "times" in row]
    for i, name in enumerate(("threshold", "sort")):
        right.bar(
            [x + 0.4 * i - 0.2 for x in range(len(found))], [row[f"{name}_us"] for row in found], 0.38, label=name
        )
    right.set_xticks(range(len(found)), [f"{row['rows']} x {row['V']}" for row in found], fontsize=7)
    right.set_ylabel("us a step")
    right.legend()


CLAIM = Claim(id="C4", stated="QPS +10 to +20 %", measure=measure, judge=judge, draw=draw, serves=True)
