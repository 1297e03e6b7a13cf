"""Tests C7: W8A8 doubles the speed of 16-bit matmuls and keeps accuracy.

Speed is a kernel's, so only a GPU can measure it. A Hopper GPU times the four matmuls of a LLaMA-2-7B layer, and XLA's
in bfloat16. Elsewhere rows come from this repository's result files, and name them. The 16-bit time is the fastest of
any run on that device, with our own kernel's, torch's and labelled runs. Whole decode steps come from quant_steps'
files, if there are any. Accuracy is measured here, on the bundled model and its text.
"""

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import jax

from experiments.claims.accuracy import judge_of, kept, percent
from experiments.claims.claim import NOT_TESTED, RESULTS, Answer, Claim, Row, all_hold, in_all, in_most, spread
from experiments.claims.recorded import PLAIN, STEPS, fastest_products, newest, pairs_on, source_of
from pallas_kernels.backends import on_hopper
from pallas_kernels.scaled_matmul import bench
from pallas_kernels.scaled_matmul.cases import BENCH_SHAPES, Case

ROWS = (1, 16, 64, 128, 256, 512, 4096)
SCHEMES = ("w8a8", "w8a8-all")
OURS, WIDE = "int8_matmul", "xla bf16"
STATED, KEPT = 2.0, 0.015  # speed-up; perplexity that may be added


def measure(toy: bool) -> Iterator[Row]:
    judge = judge_of(toy)
    for scheme in SCHEMES:
        yield {"part": "accuracy", "scheme": scheme, **judge.row(scheme)}
    yield from (timed_products() if on_hopper() else products(RESULTS))
    yield from steps(RESULTS)


def products(results: Path) -> Iterator[Row]:
    """Yields the matmuls of result files, on each device."""
    for device in dict.fromkeys(document["device"] for document, _ in newest(results, OURS)):
        for (m, k, n), (ours, wide) in pairs_on(device, results, OURS).items():
            files = ", ".join(dict.fromkeys((ours.source["file"], wide.source["file"])))
            yield product_row(m, k, n, ours.us, wide.us, ours.source | {"file": files})


def timed_products() -> Iterator[Row]:
    """Yields matmuls on this device, with the rows of a shape together."""
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


def holds(rows: list[Row]) -> Answer:
    """Decides by decode steps and matmuls of each device. A loss of accuracy cancels the gain."""
    times = [row["times"] for row in rows if "times" in row]
    faster = in_most(each > 1 for each in times)
    accurate = in_most([all_hold(kept(row, KEPT) for row in rows if row["part"] == "accuracy")])
    return faster if accurate == "yes" or faster == NOT_TESTED else accurate, in_all(each >= STATED for each in times)


def words(rows: list[Row]) -> tuple[str, str]:
    of = {part: [row for row in rows if row["part"] == part] for part in ("step", "product", "accuracy")}
    said = [f"{part}s {spread(row['times'] for row in of[part])}" for part in ("step", "product") if of[part]]
    added = f", {percent(max(row['added'] for row in of['accuracy']))} perplexity" if of["accuracy"] else ""
    return f"{said[0]} times as fast{added}", f"W8A8 makes {' and '.join(said)} times as fast as 16 bits do."


CLAIM = Claim(
    id="C7",
    stated="2 times as fast, accuracy kept",
    measure=measure,
    holds=holds,
    words=words,
    computed=True,
)
