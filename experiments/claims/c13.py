"""Tests C13: the share of matmuls in a step.

A step's matmuls of all layers and the head run alone, in order, with the same weights and rows. They are timed beside
the whole step. Decoding varies batch and length of K and V, as far as 80 GB hold it, with one compiled step per batch.
Prefill has one prompt. Only slices stand between the matmuls, to shape one's output for the next. They count as
matmuls: some percent at one row.

Each round times both, one after the other. The share is the mean with its 95 % interval (Student's t). On a GPU, `kind`
rows also sort the kernels of decode steps (experiments.step_profile): attention, rotary and cache, norms and
activations, the rest. XLA's names hide matmuls in the rest, so matmuls are measured alone.
"""

from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from statistics import mean
from typing import Any

import jax
import jax.numpy as jnp

from experiments.claims.c22 import Step
from experiments.claims.claim import (
    Answer,
    Claim,
    Interval,
    Row,
    in_all,
    in_most,
    interval_in,
    microseconds,
    over_rounds,
    percents,
)
from experiments.claims.shapes import config_of, random_params
from experiments.step_profile import table
from experiments.steps.timer import decoding_at
from jllm.config import LlamaConfig
from jllm.model.linear import linear
from jllm.model.params import Params
from pallas_kernels.bench.measure import timeline

DECODE = {
    1: (256, 1024, 4096),
    16: (256, 1024, 4096),
    64: (256, 1024),
    256: (256,),
}  # sequences: tokens of K and V each
PREFILL = (1024,)  # tokens of one prompt
STEPS, ROUNDS = 4, 5  # steps per call, and calls of each
STATED = (0.70, 0.90)


def products(params: Params, x: jax.Array, heads: jax.Array) -> jax.Array:
    """Computes all matmuls of a step on rows x [T, E]. The head sees as many rows as `heads` has."""
    for layer in params.layers:
        x = linear(x, layer.attention.qkv)[:, : layer.attention.o.shape[1]]
        x = linear(x, layer.attention.o)
        x = linear(x, layer.mlp.gate_up)[:, : layer.mlp.down.shape[1]]
        x = linear(x, layer.mlp.down)
    return linear(x[: heads.shape[0]], params.embed if params.head is None else params.head)


def products_of(params: Params, config: LlamaConfig, rows: int, heads: int) -> Callable[[], jax.Array]:
    x = jax.random.normal(jax.random.key(0), (rows, config.hidden_size), params.dtype)
    return partial(jax.jit(products), params, x, jnp.zeros(heads, params.dtype))


def measure(toy: bool) -> Iterator[Row]:
    config = config_of(toy)
    params = random_params(config, toy)
    for batch, contexts in ({2: (8, 16)} if toy else DECODE).items():
        yield from decoding(params, config, batch, contexts)
    for tokens in (16,) if toy else PREFILL:
        step, run = Step(params, config, tokens, False, config.num_layers), products_of(params, config, tokens, 1)
        times = [(step.microseconds(), microseconds(run)) for _ in range(ROUNDS)]
        yield share_row("prefill", 1, tokens, times)


def decoding(params: Params, config: LlamaConfig, batch: int, contexts: tuple[int, ...]) -> Iterator[Row]:
    """Yields a batch's rows, then drops its pages: a device cannot hold two batches."""
    steps = decoding_at(params, config, batch, max(contexts), STEPS)
    run_products = products_of(params, config, batch, batch)
    for context in contexts:
        # Each round has its own steps, as a call lengthens the sequences.
        times = [(microseconds(steps(context)) / STEPS, microseconds(run_products)) for _ in range(ROUNDS)]
        yield share_row("decode", batch, context, times)
        if jax.default_backend() == "gpu":
            yield from kinds("decode", batch, context, steps(context), mean(us for us, _ in times))


def share_row(phase: str, batch: int, tokens: int, times: Sequence[tuple[float, float]]) -> Row:
    steps, products = zip(*times)
    return {
        "phase": phase, "batch": batch, "tokens": tokens,
        "step_us": round(mean(steps), 1), "products_us": round(mean(products), 1),
        **over_rounds("share", [of_products / us for us, of_products in times]),
    }  # fmt: skip


def kinds(phase: str, batch: int, tokens: int, run: Callable[[], Any], step_us: float) -> Iterator[Row]:
    """Yields the microseconds of each kind of kernel, by name, and of the gaps. Shares are of a step's wall time."""
    sums: dict[str, float] = defaultdict(float)
    for row in table(timeline(run, python=False), STEPS):
        sums[row["kind"]] += row["us"]
    for kind, us in sums.items():
        yield {
            "phase": phase, "batch": batch, "tokens": tokens, "kind": kind, "us": round(us, 1),
            "of_step": round(us / step_us, 4),
        }  # fmt: skip


def shares(rows: list[Row]) -> list[Interval]:
    return [interval_in(row, "share") for row in rows if "share" in row]


def holds(rows: list[Row]) -> Answer:
    """Decides case by case. Matmuls must take the larger part of a step, and as much as stated."""
    found = shares(rows)
    return in_most(share.reaches(0.5) for share in found), in_all(share.within(*STATED) for share in found)


def words(rows: list[Row]) -> tuple[str, str]:
    found = shares(rows)
    inside = f"in {sum(share.within(*STATED) is True for share in found)} of {len(found)} cases"
    taken = percents(share.mean for share in found)
    line = f"Matrix products take {taken} of a step, and as much as stated {inside}."
    return f"{taken}, as stated {inside}", line


CLAIM = Claim(
    id="C13",
    stated="70 to 90 % of a step",
    measure=measure,
    holds=holds,
    words=words,
)
