"""C15: NF4 against linear int4 at equal bits: error, divergence and perplexity.

Both have 16 codes and one f16 scale for a group of the same size; NF4's codes are quantiles of a normal distribution,
int4's are evenly spaced. Rounding to nearest, no calibration, on the bundled model and the text that it wrote. NF4's
rows have the interval of its divergence less int4's, and of its perplexity over int4's less one, both of the same draws
of texts (`over_int4`). Beside them what changes the bits: a zero point (4 bits more a group), and NF4's scales in int8
themselves.
"""

from collections.abc import Iterator
from typing import Any

from experiments.accuracy.rows import rounded, weight_error
from experiments.claims.accuracy import BUNDLED_SUBJECT, Subject, judge_of, percent, subject_of
from experiments.claims.claim import Claim, Row, Verdict, by_case, verdict_of
from jllm.analysis.evaluate import Evaluation
from pallas_kernels.weight_formats import parse_weight_format

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


def judge(rows: list[Row]) -> Verdict:
    found = {(row["codes"], row["group"]): row for row in rows}
    pairs = [(group, found["nf4", group], found["int4", group]) for group in dict.fromkeys(group for _, group in found)]
    parts = []
    for said, key in (("error", "relative_error"), ("divergence", "kl")):
        ratios = {
            f"group {group}: {nf4[key] / int4[key]:.2f} of int4's": less(nf4, int4, key) for group, nf4, int4 in pairs
        }
        parts += by_case(f"less {said}", ratios)
    added = {
        f"group {group}: {percent(nf4['added'])} for {percent(int4['added'])}": less(nf4, int4, "added")
        for group, nf4, int4 in pairs
    }
    return verdict_of([*parts, *by_case("less added to perplexity", added)], how=f"On {subject_of(rows)}")


def less(nf4: Row, int4: Row, key: str) -> bool | None:
    """Whether NF4's figure is less; None where the interval of their difference, if there is one, has room for both."""
    low, high = nf4.get(f"{key}_over_int4_95", (nf4[key] - int4[key],) * 2)
    return None if low <= 0 <= high and low < high else high < 0


def draw(figure: Any, rows: list[Row]) -> None:
    every = figure.subplots(1, 3)
    labels = {"relative_error": "norm of the rounding error", "kl": "KL, nats a token", "added": "perplexity added, %"}
    for axes, (key, label) in zip(every, labels.items()):
        scale = 100 if key == "added" else 1
        for i, codes in enumerate(dict.fromkeys(row["codes"] for row in rows)):
            found = [row for row in rows if row["codes"] == codes]
            xs, ys = [row["bytes_per_weight"] for row in found], [scale * row[key] for row in found]
            ends = [row.get(f"{key}_95", (row[key],) * 2) for row in found]
            spread = [[max(y - scale * low, 0) for y, (low, _) in zip(ys, ends)],
                      [max(scale * high - y, 0) for y, (_, high) in zip(ys, ends)]]  # fmt: skip
            axes.errorbar(xs, ys, yerr=spread, fmt="o-", markersize=3, capsize=2, color=f"C{i}", label=codes)
        axes.set_xlabel("bytes a weight")
        axes.set_ylabel(label)
    every[0].legend(fontsize=7)


CLAIM = Claim(
    id="C15",
    rule=(
        "By group: NF4's figure is less than that of linear INT4 with the same group, with all of the 95 % interval of "
        "their difference where there is one; where it has room for either, that is open."
    ),
    stated="NF4 fits weights better",
    measure=measure,
    judge=judge,
    draw=draw,
    computed=True,
    chosen=True,
)
