"""C7: W8A8 doubles the speed of 16-bit products and keeps accuracy.

Speed is a kernel's, so that only a GPU can say it. On a Hopper GPU the four products of a LLaMA-2-7B layer are timed
here, with XLA's of bfloat16; elsewhere rows are what result files of this repository have, which each names. Each
device has an answer. Either way the 16-bit time is the fastest that any run on that device had, our own kernel's,
torch's and labelled runs included, and the answer is by the rows of a product. Whole decode steps come from
quant_steps' files where there are any. Accuracy is measured here, on the bundled model and the text that it wrote.
"""

import statistics
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import jax

from experiments.accuracy.measured_speed import PLAIN, STEPS, fastest_products, newest, pairs_on, source_of
from experiments.claims.accuracy import BUNDLED_SUBJECT, judge_of, percent
from experiments.claims.claim import Claim, Part, Row, Verdict, verdict_of
from pallas_kernels.backends import on_hopper
from pallas_kernels.bench.bars import bar
from pallas_kernels.scaled_matmul import bench
from pallas_kernels.scaled_matmul.cases import BENCH_SHAPES, Case

RESULTS = Path(__file__).parents[1] / "results"
ROWS = (1, 16, 64, 128, 256, 512, 4096)
SCHEMES = ("w8a8-talk", "w8a8-all")
OURS, WIDE = "int8_matmul", "xla bf16"
STATED, KEPT = 2.0, 0.015  # times as fast; perplexity that may be added
MANY = 1024  # rows from which a product's are told together


def measure(toy: bool) -> Iterator[Row]:
    judge = judge_of(toy)
    for scheme in SCHEMES:
        yield {"part": "accuracy", "scheme": scheme, **judge.row(scheme)}
    yield from (timed_products() if on_hopper() else products(RESULTS))
    yield from steps(RESULTS)


def products(results: Path) -> Iterator[Row]:
    """Yields those of result files, of each device."""
    for device in dict.fromkeys(document["device"] for document, _ in newest(results, OURS)):
        for (m, k, n), (ours, wide) in pairs_on(device, results, OURS).items():
            files = ", ".join(dict.fromkeys((ours.source["file"], wide.source["file"])))
            yield product_row(m, k, n, ours.us, wide.us, ours.source | {"file": files})


def timed_products() -> Iterator[Row]:
    """On this device, the rows of a shape together."""
    device = jax.devices()[0].device_kind
    known = fastest_products(RESULTS, device)
    with ThreadPoolExecutor(16) as pool:
        for k, n in BENCH_SHAPES:
            ours, wide = (
                bench.measure([Case(m, n, k, bench.PRODUCTS[name][1]) for m in ROWS], name, pool)
                for name in (OURS, WIDE)
            )
            for (case, us), (_, wide_us) in zip(ours, wide):
                if isinstance(us, Exception) or isinstance(wide_us, Exception):
                    failed = us if isinstance(us, Exception) else wide_us
                    yield {
                        "part": "product",
                        "M": case.m,
                        "K": k,
                        "N": n,
                        "error": str(failed).partition("\n")[0][:200],
                    }
                    continue
                best = known.get((case.m, k, n))
                here = best is None or wide_us <= best.us
                file = "measured here" if best is None or here else f"measured here, {best.source['file']}"
                source = {"file": file, "measured_on": device}
                yield product_row(case.m, k, n, us, wide_us if best is None or here else best.us, source)


def product_row(m: int, k: int, n: int, us: float, wide_us: float, source: Row) -> Row:
    row: Row = {"part": "product", "M": m, "K": k, "N": n, "us": round(us, 2), "bf16_us": round(wide_us, 2)}
    return row | {"times": round(wide_us / us, 3)} | source


def steps(results: Path) -> Iterator[Row]:
    """Yields whole decode steps with 16-bit K and V, from the newest complete file of each device."""
    for document, file in newest(results, STEPS):
        found = {(r["scheme"], r["kv"], r["batch"]): r["decode_ms"] for r in document["rows"] if "decode_ms" in r}
        for (scheme, kv, batch), ms in found.items():
            wide = found.get((*PLAIN, batch))
            if scheme in SCHEMES and kv == PLAIN[1] and wide:
                times = round(wide / ms, 3)
                about = {"part": "step", "model": document.get("model", "a model"), "scheme": scheme, "batch": batch}
                yield about | {"ms": ms, "bf16_ms": wide, "times": times} | source_of(document, file)


def judge(rows: list[Row]) -> Verdict:
    """Yes and no by the rows of a product, for whole decode steps, and for accuracy."""
    of = {part: [row for row in rows if row["part"] == part] for part in ("accuracy", "product", "step")}
    bars = [bar(f"perplexity added by {row['scheme']}", row["added"], "1", KEPT, most=True) for row in of["accuracy"]]
    kept = [
        Part(
            f"accuracy kept on {BUNDLED_SUBJECT.name}: {row['scheme']} adds {percent(row['added'])} to perplexity, "
            f"KL {row['kl']:.2g}",
            each["met"],
        )
        for row, each in zip(of["accuracy"], bars)
    ]
    parts = []  # of speed, which comes first: a page in short has room for little
    steps = [row["times"] for row in of["step"]]
    if steps:
        middle = statistics.median(steps)
        model = of["step"][0].get("model", "a model")
        said = f"{len(steps)} decode steps of {model} {STATED:g} times as fast: {between(steps)}, median {middle:.2f}"
        parts.append(Part(said, middle >= STATED))
    parts += [
        Part(f"{counted(some, times)}products {where}: {between(some)}", holds)
        for where, times in by_rows(of["product"])
        for holds in (True, False)
        if (some := [each for each in times if (each >= STATED) is holds])
    ]
    if not (steps or of["product"]):
        return Verdict("not measured: speed", tuple(part.said for part in kept), bars=tuple(bars))
    count = f"{len(of['product'])} products against the fastest of bf16"
    return verdict_of(parts + kept, count if of["product"] else "", bars=bars)


def by_rows(products: list[Row]) -> list[tuple[str, list[float]]]:
    """How many times as fast the products of each number of rows are."""
    groups: dict[int, list[float]] = {}
    for row in products:
        groups.setdefault(min(row["M"], MANY), []).append(row["times"])
    said = {1: "of 1 row", MANY: f"from {MANY:,} rows on"}
    return [(said.get(m, f"of {m}"), groups[m]) for m in sorted(groups)]


def counted(some: list[float], times: list[float]) -> str:
    """How many of all, where it is not all."""
    return "" if len(some) == len(times) else f"{len(some)} of {len(times)} "


def between(times: list[float]) -> str:
    return f"{min(times):.2f} to {max(times):.2f}"


def draw(figure: Any, rows: list[Row]) -> None:
    left, right = figure.subplots(1, 2)
    found = [row for row in rows if row["part"] == "product"]
    for k, n, device in dict.fromkeys((row["K"], row["N"], row.get("measured_on")) for row in found):
        shape = {"K": k, "N": n} | ({"measured_on": device} if device else {})
        of_shape = sorted((row["M"], row["times"]) for row in found if shape.items() <= row.items())
        left.semilogx(*zip(*of_shape), "o-", base=2, markersize=3, label=f"{k} x {n}")
    left.set_xlabel("rows of a product (K x N)")
    for device, some in (CLAIM.of_devices(rows) or {"": rows}).items():
        for scheme in SCHEMES:
            steps = (row for row in some if row["part"] == "step" and row["scheme"] == scheme)
            if of_scheme := sorted((row["batch"], row["times"]) for row in steps):
                name = f"{scheme}{device.replace('NVIDIA', ',')}"
                right.semilogx(*zip(*of_scheme), "o-", base=2, markersize=3, label=name)
    right.set_xlabel("batch of a decode step" if right.lines else "batch of a decode step: not measured yet")
    for axes in (left, right):
        axes.axhline(STATED, color="black", linestyle="--", linewidth=1)
        axes.axhline(1, color="gray", linewidth=1)
        axes.set_ylim(0, 3)
        axes.set_ylabel("times as fast as bfloat16 (stated: dashed)")
        if axes.get_legend_handles_labels()[0]:
            axes.legend(fontsize=8)


CLAIM = Claim(
    id="C7",
    rule=(
        f"{STATED:g} times as fast: the median of the decode steps, and each product, by its rows. Accuracy "
        f"is kept where perplexity rises by at most {KEPT:.1%}."
    ),
    stated="+100 %, accuracy kept",
    measure=measure,
    judge=judge,
    draw=draw,
    computed=True,
    by_device=True,
)
