"""Tests C9: INT8's error vs. FP8's (e4m3), and the damage of a wrong scale to either.

The first rows only round, with a scale per row: the bundled model's weights, by output channel, and its linear layers'
inputs, by token. They have the relative norm of the error. The next rows have whole models' divergence. The last rows
use a multiple of the right scale: below 1 it clips the largest values, above 1 it wastes codes.
"""

import math
from collections.abc import Iterable, Iterator

import jax
import jax.numpy as jnp
import numpy as np

from experiments.accuracy.rows import rounded
from experiments.claims.accuracy import BUNDLED_SUBJECT, Judge, Subject, judge_of, of_subject
from experiments.claims.claim import Answer, Claim, Row, in_all, in_most, spread
from jllm.analysis.activations import tap
from jllm.analysis.protocols import encode, find_protocol
from jllm.model.params import matrices
from pallas_kernels.formats.quantized_rows import KINDS, LARGEST
from pallas_kernels.formats.rounding import to_float8

TOKENS, TOY_TOKENS = 512, 32
READ = {
    "attn_norm": "input of QKV",
    "attention": "input of O",
    "mlp_norm": "input of gate and up",
    "silu_mul": "input of down",
}
WEIGHTS = {"qkv": "QKV", "o": "O", "gate_up": "gate and up", "down": "down"}
FACTORS = (0.25, 0.5, 0.71, 1.0, 1.41, 2.0, 4.0, 16.0)
PAIRS = (("w8a16", "fp8-weight"), ("w8a8-all", "fp8"))  # the same layers: weights alone, and activations too
STATED = 10.0
SENSITIVE = 1.5  # multiple of the error, within a factor of 4, that counts as sensitive


def measure(toy: bool, subject: Subject = BUNDLED_SUBJECT) -> Iterator[Row]:
    judge = judge_of(toy, subject)
    values = {"weights": weights(judge), "activations": activations(judge, TOY_TOKENS if toy else TOKENS)}
    for kind, named in values.items():
        for name, arrays in (named | {"all": [x for each in named.values() for x in each]}).items():
            yield {"part": "rounding", "of": kind, "which": name, **both(arrays, 1.0)}
    for eight, floating in PAIRS[:1] if toy else PAIRS:
        kl = [judge.row(scheme)["kl"] for scheme in (eight, floating)]
        row: Row = {"part": "model", "of": f"{eight} and {floating}", "int8_kl": kl[0], "fp8_kl": kl[1]}
        yield row | {"fp8_over_int8": round(kl[1] / kl[0], 3)}
    for kind, named in values.items():
        for factor in FACTORS:
            yield {
                "part": "scale",
                "of": kind,
                "factor": factor,
                **both([x for e in named.values() for x in e], factor),
            }


def weights(judge: Judge) -> dict[str, list[jax.Array]]:
    """Returns weights, whose rows are output channels."""
    return {text: [matrices(layer)[name] for layer in judge.model.params.layers] for name, text in WEIGHTS.items()}


def activations(judge: Judge, count: int) -> dict[str, list[jax.Array]]:
    """Returns activations, whose rows are tokens."""
    ids = encode(judge.model.tokenizer, "\n\n".join(judge.texts), find_protocol("windows-512"))[:count]
    found = tap(judge.model, ids, [f"layers.*.{name}" for name in READ])
    return {text: [x for key, x in found.items() if key.endswith(f".{name}")] for name, text in READ.items()}


def both(arrays: Iterable[jax.Array], factor: float) -> Row:
    """Returns the error of each kind, and FP8's over INT8's, of norms and of their squares."""
    arrays = list(arrays)
    found = {kind: relative_error(arrays, kind, factor) for kind in ("int8", "fp8")}
    row: Row = {f"{kind}_error": rounded(error) for kind, error in found.items()}
    over = found["fp8"] / found["int8"]
    return row | {"fp8_over_int8": round(over, 3), "squared": round(over**2, 3)}


def relative_error(arrays: Iterable[jax.Array], kind: str, factor: float) -> float:
    sums = np.asarray([jax.device_get(_errors(x, kind, factor)) for x in arrays], np.float64).sum(axis=0)
    return math.sqrt(sums[0] / sums[1])


@jax.jit(static_argnums=1)
def _errors(x: jax.Array, kind: str, factor: float) -> tuple[jax.Array, jax.Array]:
    """Returns the squared norms of the rounding error and of x [.., E], with `factor` times each row's own scale."""
    x = x.astype(jnp.float32)
    y = round_trip(x, kind, factor)
    return jnp.sum((x - y) ** 2), jnp.sum(x * x)


def round_trip(x: jax.Array, kind: str, factor: float | jax.Array) -> jax.Array:
    """Returns x after rounding to codes of a kind, with a scale per row of factor * absmax / largest."""
    scales = jnp.max(jnp.abs(x), axis=-1, keepdims=True) * (factor / LARGEST[kind])
    scales = jnp.maximum(scales, jnp.finfo(x.dtype).tiny)
    codes = jnp.clip(x / scales, -LARGEST[kind], LARGEST[kind])
    codes = jnp.round(codes) if kind == "int8" else to_float8(codes, KINDS[kind]).astype(x.dtype)
    return codes * scales


def ratios(rows: list[Row]) -> list[float]:
    """Returns FP8's error over INT8's: of norms, of their squares, and of whole models' divergence."""
    whole = [row for row in rows if row["part"] == "rounding" and row["which"] == "all"]
    of_models = [row["fp8_over_int8"] for row in rows if row["part"] == "model"]
    return [row[key] for key in ("fp8_over_int8", "squared") for row in whole] + of_models


def holds(rows: list[Row]) -> Answer:
    """Decides by each measure of the error. The size also needs both sides of the scale: FP8 must err less than
    SENSITIVE times as much with a wrong scale, and INT8 more."""
    growth = zip(spread_of(rows, "int8"), spread_of(rows, "fp8"))
    sides = [fp8 < SENSITIVE <= int8 for int8, fp8 in growth]
    return in_most(ratio > 1 for ratio in ratios(rows)), in_all([*(each >= STATED for each in ratios(rows)), *sides])


def words(rows: list[Row]) -> tuple[str, str]:
    times, (_, down) = spread(ratios(rows), "{:.1f}"), spread_of(rows, "fp8")
    line = f"FP8 errs {times} times as much as INT8; a quarter of its scale multiplies its error by {down:.0f}"
    return (
        f"{times} times INT8's error; {down:.0f} times its own at a quarter of the scale",
        f"{line}{of_subject(rows)}.",
    )


def spread_of(rows: list[Row], kind: str) -> tuple[float, float]:
    """Returns the largest error over the right scale's: with scales up to 4 times too large, and down to a quarter."""
    up, down = [], []
    for of in dict.fromkeys(row["of"] for row in rows if row["part"] == "scale"):
        found = {row["factor"]: row[f"{kind}_error"] for row in rows if row["part"] == "scale" and row["of"] == of}
        up += [error / found[1.0] for factor, error in found.items() if 1 <= factor <= 4]
        down += [error / found[1.0] for factor, error in found.items() if 0.25 <= factor <= 1]
    return max(up), max(down)


CLAIM = Claim(
    id="C9",
    stated="FP8's error 10 times INT8's, and insensitive to its scale",
    measure=measure,
    holds=holds,
    words=words,
    computed=True,
    chosen=True,
)
