"""C25: FP8 weights and activations serve about as fast as INT8 ones, and both faster than INT4 weights.

Steps of LLaMA-2-7B, measured: those of the newest file of experiments.quant_steps, all schemes in one run. Requests a
second on the QPS workload, all at once: measured on a Hopper GPU, elsewhere simulated with a cost model for each scheme
that is fitted to these same steps, of the device that `steps_of` names, with as many pages as an H200 has room for
(`fit_error`: the largest of its errors on them). Serving means the steps from SERVING rows on; below that INT4 reads
the fewest bytes, and what it gains there is C8's.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from experiments.accuracy.measured_speed import STEPS, newest, source_of
from experiments.claims.claim import Claim, Part, Row, Verdict, all_hold, verdict_of
from experiments.claims.contest import NOISE
from experiments.claims.loads import MODEL, server, simulates
from experiments.quant_steps import Case, parse_args
from experiments.simulate import Costs
from experiments.steps.cost_model import Shares, fit, make_cost_model, model_shapes

RESULTS = Path(__file__).parents[1] / "results"
SCHEMES = {"fp8": "fp8", "int8": "w8a8-all", "int4": "w4a16-g128"}  # all linear layers quantized
TOY_INT4 = "w4a16-g32"  # a toy's rows are shorter than a group of 128
SERVING = 64
TOY_SLOTS = 2
SLOTS, COUNT = 128, 512  # served at once on a GPU; simulated, too, and the whole workload in 512 slots
ABOUT = 0.05  # how far apart two that are about equal may be


def measure(toy: bool) -> Iterator[Row]:
    source, found = recorded(RESULTS)
    for name, scheme in SCHEMES.items():
        for row in found:
            if row["scheme"] == scheme:
                kept = {key: row[key] for key in ("kind", "batch", "ms")}
                yield {"part": "step", "format": name, "source": "measured", **kept, **source}
    sizes = [(TOY_SLOTS, None)] if toy else [(SLOTS, COUNT), (512, None)][: 1 + simulates(toy)]
    for slots, count in sizes:
        for name, scheme in SCHEMES.items():
            costs = fitted(scheme, found, source.get("file", "")) if simulates(toy) else None
            row = server(toy, costs)(count=count, slots=slots, quantize=TOY_INT4 if toy and name == "int4" else scheme)
            if costs is not None:
                row |= {"fit_error": round(costs.cost.shares.error or 0.0, 3), "steps_of": source["measured_on"]}
            yield {"part": "requests", "format": name, "slots": slots, **row}


def recorded(results: Path) -> tuple[Row, list[Row]]:
    """What names the newest file of quant_steps, and its steps over 16-bit pages: {scheme, kind, batch, context, ms}
    each."""
    for document, file in newest(results, STEPS)[-1:]:
        rows = [row for row in document["rows"] if row.get("kv") == "bf16"]
        found = [(row, kind) for row in rows for kind in ("decode", "prefill") if f"{kind}_ms" in row]
        names = ("scheme", "batch", "kv")
        return source_of(document, file), [
            {name: row[name] for name in names}
            | {"kind": kind, "context": row.get("context", 0), "ms": row[f"{kind}_ms"]}
            for row, kind in found
        ]
    return {}, []


def fitted(scheme: str, rows: list[Row], file: str) -> Costs:
    """What steps cost with a scheme's weights, by those that were measured."""
    model, options = model_shapes(MODEL, scheme), parse_args([])
    plain = make_cost_model(model, None, Shares())
    steps = []
    for row in rows:
        if row["scheme"] == scheme:
            case = Case(scheme, row["kind"], row["batch"], row["kv"])
            steps.append((case.work(row["context"], options.input), row["ms"] / 1e3))
    return Costs(model, make_cost_model(model, None, fit(steps, plain.floor, plain.token_bytes, file)))


def ratios(rows: list[Row], name: str, over: str) -> dict[tuple[Any, ...], float]:
    """How many times as fast a format is as another: of steps by kind and batch, of requests by slots."""
    speed = {}
    for row in rows:
        case = (row["kind"], row["batch"]) if row["part"] == "step" else ("requests", row["slots"])
        speed[row["format"], case] = 1 / row["ms"] if row["part"] == "step" else row["qps"]
    both = [case for of, case in speed if of == name and (over, case) in speed]
    return {case: speed[name, case] / speed[over, case] for case in both}


def judge(rows: list[Row]) -> Verdict:
    parts: list[Part] = []
    source = next((row["source"] for row in rows if row["part"] == "requests"), None)
    errors = [row["fit_error"] for row in rows if "fit_error" in row]
    how = f"{source} by steps within {max(errors):.0%}" if errors else source
    said = {"decode": f"decode steps from batch {SERVING} on", "prefill": f"prefill from batch {SERVING} on"}
    for kind, where in (*said.items(), ("requests", f"requests a second, {how}")):
        pairs = {}
        for name, over in (("fp8", "int8"), ("fp8", "int4"), ("int8", "int4")):
            found = ratios(rows, name, over)
            pairs[name, over] = [v for (k, n), v in found.items() if k == kind and (k == "requests" or n >= SERVING)]
        if all(pairs.values()):
            margin = max(errors, default=NOISE) if kind == "requests" else 0.0
            gaps = [abs(v - 1) for v in pairs["fp8", "int8"]]
            equal = all_hold(None if abs(gap - ABOUT) < margin else gap <= ABOUT for gap in gaps)
            parts.append(Part(f"fp8 about int8's speed in {where} ({between(pairs['fp8', 'int8'])} times)", equal))
            above = [each for over, each in pairs.items() if over[1] == "int4"]
            text = " and ".join(between(each) for each in above)
            faster = all_hold(None if abs(v - 1) <= margin else v > 1 for v in sum(above, []))
            parts.append(Part(f"both faster than int4 in {where} ({text} times)", faster))
    few = [
        f"{v:.2f} at batch {n}" for (k, n), v in ratios(rows, "fp8", "int4").items() if k == "decode" and n < SERVING
    ]
    if not parts:
        return verdict_of([Part("nothing was measured of all three", False)])
    slower = f"below that int4 is the fastest: fp8 {', '.join(few)} times its decode steps' speed" if few else ""
    return verdict_of(parts, slower)


def between(values: list[float]) -> str:
    return f"{min(values):.2f} to {max(values):.2f}"


def draw(figure: Any, rows: list[Row]) -> None:
    left, right = figure.subplots(1, 2)
    for name in SCHEMES:
        steps = [row for row in rows if row["part"] == "step" and row["kind"] == "decode" and row["format"] == name]
        left.loglog([row["batch"] for row in steps], [row["ms"] for row in steps], "o-", base=2, label=name)
    left.set_xlabel("batch")
    left.set_ylabel("ms a decode step, measured")
    left.legend()
    served = [row for row in rows if row["part"] == "requests"]
    right.bar(range(len(served)), [row["qps"] for row in served])
    right.set_xticks(range(len(served)), [f"{row['format']}\n{row['slots']} slots" for row in served], fontsize=7)
    right.set_ylabel(f"requests a second, {served[0]['source']}" if served else "requests a second")


CLAIM = Claim(
    id="C25",
    rule=(
        f"About as fast is within {ABOUT:.0%} in every case; faster is faster in every case. Of requests a second what "
        f"{NOISE:.0%} could turn is open, as by so much two runs have differed; of simulated ones, what the largest "
        "error of the costs on the measured steps could."
    ),
    stated="FP8 about INT8, both above INT4",
    measure=measure,
    judge=judge,
    draw=draw,
    serves=True,
    computed=True,
)
