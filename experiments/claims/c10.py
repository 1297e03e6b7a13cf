"""Tests C10: group quantization is the most accurate integer scheme, and groups of 8 are its ceiling.

The bundled model's weights, and its K and V on its own text, are rounded to int8 and int4. One scale covers a whole
tensor, a row (one head's values of a token, for K and V), or a group of down to 2 values. Rows have the relative norm
of the error, and bytes with f16 scales. If jllm serves a format, its row also has the whole model's divergence from the
unquantized one.
"""

import math
from collections.abc import Iterator, Sequence

import jax

from experiments.accuracy.rows import kv_error, rounded, weight_error
from experiments.claims.accuracy import BUNDLED_SUBJECT, Judge, Subject, judge_of, of_subject
from experiments.claims.claim import Answer, Claim, Row, in_all, in_most, spread
from jllm.analysis.activations import tap
from jllm.analysis.protocols import encode, find_protocol
from jllm.model.params import linears
from pallas_kernels.formats.kv_formats import KVFormat
from pallas_kernels.formats.quantized_weights import decode
from pallas_kernels.formats.quantized_weights import encode as encode_weight
from pallas_kernels.formats.weight_formats import WeightFormat

CODES = ("int8", "int4")
GROUPS, SMALLER = (8, 16, 32, 64), (2, 4)  # served sizes, and possible ones
TOKENS, TOY_TOKENS = 512, 32
WEIGHT_NAMES = {"int8": "w8a16", "int4": "w4a16"}
CEILING, BEYOND = "8", "4"


def measure(toy: bool, subject: Subject = BUNDLED_SUBJECT) -> Iterator[Row]:
    judge = judge_of(toy, subject)
    groups = (8, 16) if toy else GROUPS
    ids = encode(judge.model.tokenizer, "\n\n".join(judge.texts), find_protocol("windows-512"))
    taps = tap(judge.model, ids[: TOY_TOKENS if toy else TOKENS], ["layers.*.k", "layers.*.v"])
    kv = {name: [x for key, x in taps.items() if key.endswith(f".{name}")] for name in ("k", "v")}
    for codes in CODES:
        yield from weight_rows(judge, codes, groups)
        yield from kv_rows(judge, kv, codes, groups)


def weight_rows(judge: Judge, codes: str, groups: Sequence[int]) -> Iterator[Row]:
    params = judge.model.params
    for group in (*SMALLER, *groups):
        row = _row("weights", codes, str(group), *weight_error(params, WeightFormat(codes, group)))
        yield row | (divergence(judge, f"{WEIGHT_NAMES[codes]}-g{group}", "model") if group in GROUPS else {})
    if codes == "int8":  # jllm has no int4 format with a scale per row
        row = _row("weights", codes, "row", *weight_error(params, WeightFormat(codes)))
        yield row | divergence(judge, WEIGHT_NAMES[codes], "model")
    yield _row("weights", codes, "tensor", *tensor_error(judge, codes))


def kv_rows(judge: Judge, kv: dict[str, list[jax.Array]], codes: str, groups: Sequence[int]) -> Iterator[Row]:
    """Yields the rows of K and V together. A group of all values of a head is a row."""
    values = [x for each in kv.values() for x in each]
    head_dim = judge.model.config.head_dim
    for group in (*SMALLER, *groups):
        row = _row(
            "K and V", codes, "row" if group == head_dim else str(group), *kv_error(values, KVFormat(codes, group))
        )
        yield row | (divergence(judge, "bf16", f"{codes}-g{group}") if group in GROUPS else {})
    flat = [x.reshape(1, -1) for x in values]
    errors = [kv_error([x], KVFormat(codes, x.shape[1])) for x in flat]
    yield _row("K and V", codes, "tensor", errors[0][0], _together([error for _, error in errors], flat))


def divergence(judge: Judge, scheme: str, kv: str) -> Row:
    found = judge.row(scheme, kv)
    return {key: found[key] for key in ("kl", "kl_95", "added") if key in found}


def tensor_error(judge: Judge, codes: str) -> tuple[float, float]:
    """Returns the bytes and error of weights with one scale each, as matrices of one row."""
    leaves = list(linears(judge.model.params).values())
    found = [_flat_error(leaf, codes) for leaf in leaves]
    return 0.5 if codes == "int4" else 1.0, _together(found, leaves)


def _flat_error(w: jax.Array, codes: str) -> float:
    flat = w.reshape(1, -1)
    fmt = WeightFormat(codes, None if codes == "int8" else flat.shape[1])
    back = decode(jax.jit(encode_weight, static_argnums=1)(flat, fmt))
    return float(jax.numpy.linalg.norm(flat - back) / jax.numpy.linalg.norm(flat))


def _together(errors: Sequence[float], arrays: Sequence[jax.Array]) -> float:
    """Returns the relative error of several arrays together."""
    signal = [float(jax.numpy.sum(x * x)) for x in arrays]
    return math.sqrt(math.fsum(e * e * s for e, s in zip(errors, signal)) / math.fsum(signal))


def _row(of: str, codes: str, scale_for: str, bytes_each: float, error: float) -> Row:
    return {
        "of": of,
        "codes": codes,
        "scale_for": scale_for,
        "bytes": round(bytes_each, 4),
        "relative_error": rounded(error),
    }


def cases(rows: list[Row]) -> list[dict[str, Row]]:
    """Returns the rows of weights, and of K and V, in each number of bits. Each case is by values per scale."""
    kinds = dict.fromkeys((row["of"], row["codes"]) for row in rows)
    return [{row["scale_for"]: row for row in rows if (row["of"], row["codes"]) == kind} for kind in kinds]


def falls(case: dict[str, Row]) -> bool:
    """Returns whether error and divergence fall with the group size, and groups err less than one scale per tensor."""
    served = [row for row in case.values() if "kl" in row]  # from the smallest group up
    falling = all(a[key] < b[key] for key in ("relative_error", "kl") for a, b in zip(served, served[1:]))
    return falling and case[CEILING]["relative_error"] < case["tensor"]["relative_error"]


def beyond(rows: list[Row]) -> list[float]:
    """Returns the error of smaller groups, which take more bytes, over that of the claim's ceiling."""
    both = [(case[BEYOND], case[CEILING]) for case in cases(rows) if BEYOND in case]
    return [four["relative_error"] / eight["relative_error"] for four, eight in both]


def holds(rows: list[Row]) -> Answer:
    return in_most(map(falls, cases(rows))), in_all(times >= 1 for times in beyond(rows))


def words(rows: list[Row]) -> tuple[str, str]:
    found = list(map(falls, cases(rows)))
    further = sum(times < 1 for times in beyond(rows))
    line = f"Smaller groups err less in {sum(found)} of {len(found)} cases, and groups of 4 less than of 8 in {further}"
    return f"groups of 4 err {spread(beyond(rows))} times as much as 8", f"{line}{of_subject(rows)}."


CLAIM = Claim(
    id="C10",
    stated="groups most accurate, 8 the ceiling",
    measure=measure,
    holds=holds,
    words=words,
    computed=True,
    chosen=True,
)
