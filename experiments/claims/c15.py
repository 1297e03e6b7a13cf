"""Tests C15: NF4 vs. linear int4 at equal bits, by error, divergence and perplexity.

Both have 16 codes and an f16 scale per group of the same size. NF4's codes are quantiles of a normal distribution;
int4's are evenly spaced. Weights are rounded to nearest, without calibration, in the bundled model on its own text.
NF4's rows have `over_int4` intervals of paired draws of texts: the difference of divergence, and the relative growth of
perplexity. Other rows change the bits: a zero point (4 bits more per group), and NF4 with int8 scales.
"""

from collections.abc import Iterator

from experiments.accuracy.rows import rounded, weight_error
from experiments.claims.accuracy import BUNDLED_SUBJECT, Subject, judge_of, of_subject
from experiments.claims.claim import Answer, Claim, Row, in_most, spread
from jllm.analysis.evaluate import Evaluation
from pallas_kernels.formats.weight_formats import parse_weight_format

GROUPS = (16, 32, 64)
COMPARED = ("kl", "added")
NAMES = {"int4": "w4a16-g{}", "nf4": "nf4-g{}", "int4-zp": "w4a16-g{}-zp", "nf4-dq": "nf4-g{}-dq"}


def measure(toy: bool, subject: Subject = BUNDLED_SUBJECT) -> Iterator[Row]:
    judge = judge_of(toy, subject)
    for group in GROUPS[-1:] if toy else GROUPS:
        linear: Evaluation | None = None
        for codes, form in list(NAMES.items())[: 2 if toy else None]:
            fmt = parse_weight_format(form.format(group))
            bytes_each, error = weight_error(judge.model.params, fmt)
            row: Row = {
                "codes": codes,
                "group": group,
                "bytes_per_weight": round(bytes_each, 4),
                "relative_error": rounded(error),
            }
            added, found = judge.found(fmt.name)
            linear = found if codes == "int4" else linear
            if codes == "nf4" and linear is not None and len(found.parts) > 1:
                over = {name: found.interval(name, over=linear) for name in COMPARED}
                row |= {f"{name}_over_int4_95": [rounded(x) for x in ends] for name, ends in over.items()}
            yield row | added


def pairs(rows: list[Row]) -> list[tuple[Row, Row]]:
    """Returns the rows of NF4 and of int4, by group."""
    found = {(row["codes"], row["group"]): row for row in rows}
    return [(found["nf4", group], found["int4", group]) for group in dict.fromkeys(group for _, group in found)]


def holds(rows: list[Row]) -> Answer:
    """Decides by the error, the divergence and the added perplexity of each group."""
    return in_most(less(*pair, key) for pair in pairs(rows) for key in ("relative_error", "kl", "added")), ""


def words(rows: list[Row]) -> tuple[str, str]:
    error, kl = (spread(nf4[key] / int4[key] for nf4, int4 in pairs(rows)) for key in ("relative_error", "kl"))
    line = f"At equal bits NF4 diverges {kl} times as much as linear INT4{of_subject(rows)}."
    return f"{error} times INT4's error, {kl} times its divergence", line


def less(nf4: Row, int4: Row, key: str) -> bool | None:
    """Returns whether NF4's value is less, or None if the interval of the difference allows both."""
    low, high = nf4.get(f"{key}_over_int4_95", (nf4[key] - int4[key],) * 2)
    return None if low <= 0 <= high and low < high else high < 0


CLAIM = Claim(
    id="C15",
    stated="NF4 fits weights better",
    measure=measure,
    holds=holds,
    words=words,
    computed=True,
    chosen=True,
)
