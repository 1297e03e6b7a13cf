"""C10: group quantization is the most accurate of the integer schemes, and groups of 8 are its ceiling.

The bundled model's weights, and its K and V on its own text, rounded to int8 and int4 with one scale for a whole
tensor, for a row (a head's values of a token, for K and V), and for groups down to 2 values: the norm of the error over
that of the values, and bytes with f16 scales. Where a size is a format that serves, the whole model with it is measured
too, by its divergence from the unquantized one.
"""

import math
from collections.abc import Iterator, Sequence
from typing import Any

import jax

from experiments.accuracy.rows import kv_error, rounded, weight_error
from experiments.claims.accuracy import BUNDLED_SUBJECT, Judge, Subject, judge_of, subject_of
from experiments.claims.claim import Claim, Row, Verdict, by_case, verdict_of
from jllm.analysis.activations import tap
from jllm.analysis.protocols import encode, find_protocol
from jllm.params import linears
from pallas_kernels.kv_formats import KVFormat
from pallas_kernels.quantized_weights import decode
from pallas_kernels.quantized_weights import encode as encode_weight
from pallas_kernels.weight_formats import WeightFormat

CODES = ("int8", "int4")
GROUPS, SMALLER = (8, 16, 32, 64), (2, 4)  # what serves, and what could be
TOKENS, TOY_TOKENS = 512, 32
WEIGHT_NAMES = {"int8": "w8a16", "int4": "w4a16"}
CEILING = 8


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
    if codes == "int8":  # int4 with a scale a row is no format here
        row = _row("weights", codes, "row", *weight_error(params, WeightFormat(codes)))
        yield row | divergence(judge, WEIGHT_NAMES[codes], "model")
    yield _row("weights", codes, "tensor", *tensor_error(judge, codes))


def kv_rows(judge: Judge, kv: dict[str, list[jax.Array]], codes: str, groups: Sequence[int]) -> Iterator[Row]:
    """Rows of K and V together. A group of all a head's values is a row."""
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
    """Bytes and error of weights with one scale each: as matrices of one row."""
    leaves = list(linears(judge.model.params).values())
    found = [_flat_error(leaf, codes) for leaf in leaves]
    return 0.5 if codes == "int4" else 1.0, _together(found, leaves)


def _flat_error(w: jax.Array, codes: str) -> float:
    flat = w.reshape(1, -1)
    fmt = WeightFormat(codes, None if codes == "int8" else flat.shape[1])
    back = decode(jax.jit(encode_weight, static_argnums=1)(flat, fmt))
    return float(jax.numpy.linalg.norm(flat - back) / jax.numpy.linalg.norm(flat))


def _together(errors: Sequence[float], arrays: Sequence[jax.Array]) -> float:
    """Relative errors of several arrays as one of all."""
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


def judge(rows: list[Row]) -> Verdict:
    figures, falls, best, beyond = [], {}, {}, {}
    for of, codes in dict.fromkeys((row["of"], row["codes"]) for row in rows):
        name = f"{of} {codes}"
        found = {row["scale_for"]: row for row in rows if (row["of"], row["codes"]) == (of, codes)}
        served = [row for row in found.values() if "kl" in row]
        falls[name] = all(  # from group 8 up
            a[key] < b[key] for key in ("relative_error", "kl") for a, b in zip(served, served[1:])
        )
        best[name] = found[str(CEILING)]["relative_error"] < found["tensor"]["relative_error"]
        smaller = found.get("4", {}).get("relative_error")
        if smaller is not None:
            beyond[name] = smaller >= found[str(CEILING)]["relative_error"]
        ends = [
            f"{served[0]['relative_error']:.2g} at 8",
            f"{served[-1]['relative_error']:.2g} for {served[-1]['scale_for']}",
        ]
        ends += [f"{found['tensor']['relative_error']:.2g} a tensor"] + [f"{e:.2g} at 4" for e in [smaller] if e]
        more = served[-1]["kl"] / served[0]["kl"]
        figures.append(f"{name}: error {', '.join(ends)}; KL for {served[-1]['scale_for']} {more:.1f} times that at 8")
    parts = by_case("groups more accurate than a tensor's scale", best) + by_case("the smaller the more so", falls)
    parts += by_case(f"{CEILING} the ceiling, groups of 4, which take more bytes, being no better", beyond)
    return verdict_of(parts, *figures, how=f"On {subject_of(rows)}")


def draw(figure: Any, rows: list[Row]) -> None:
    errors, divergences = figure.subplots(1, 2)
    for of, style in (("weights", "o-"), ("K and V", "s--")):
        for codes, color in (("int8", "C0"), ("int4", "C3")):
            found = [row for row in rows if (row["of"], row["codes"]) == (of, codes)]
            label = f"{of}, {codes}"
            for axes, key in ((errors, "relative_error"), (divergences, "kl")):
                points = [(row["bytes"], row[key]) for row in found if key in row]
                if not points:
                    continue
                axes.semilogy(*zip(*points), style, color=color, markersize=3, label=label)
                for row in found:
                    if key in row and (key == "kl" or of == "weights"):
                        at = (row["bytes"], row[key])
                        axes.annotate(row["scale_for"], at, (3, 3), textcoords="offset points", fontsize=6)
    errors.set_ylabel("norm of the rounding error over that of the values")
    divergences.set_ylabel("KL of the model, nats a token")
    for axes in (errors, divergences):
        axes.set_xlabel("bytes a value (numbers: values that share a scale)")
        axes.legend(fontsize=7)


CLAIM = Claim(
    id="C10",
    rule=(
        "By weights and by K and V, in 8 and in 4 bits: groups of 8 err less than one scale a tensor; error "
        "and divergence fall with the group; and groups of 4 err no less than those of 8."
    ),
    stated="groups most accurate, 8 the ceiling",
    measure=measure,
    judge=judge,
    draw=draw,
    computed=True,
    chosen=True,
)
