"""Checks direction and size of each claim on planted rows, and committed verdicts on their own rows."""

import json

import pytest

from experiments.claims import c8, c18, c28
from experiments.claims.claim import RESULTS, interval_of, measured_rows
from experiments.claims.registry import TITLES, find
from experiments.claims.run import verdict_of

YES, NO, OPEN, NOT_TESTED = "yes", "no", "open", "not tested"


def policies(ours: str, other: str, ratio: float, off: float = 0.01, rounds: int = 3) -> list[dict]:
    """Runs under two policies, alternated; the gain of a round is off the others'."""
    rows = []
    for at, side in list(enumerate((0, -1, 1)))[:rounds]:
        rows += [{"policy": name, "round": at, "qps": qps} for name, qps in ((ours, ratio + off * side), (other, 1.0))]
    return rows


def c1_curve(*gains: float, source: str = "simulated") -> list[dict]:
    """Runs of both policies at points of more and more slots."""
    points = [{"source": source, "slots": slots, "requests": 512} for slots in range(1, len(gains) + 1)]
    return [
        {"policy": name, "qps": qps, **at}
        for at, gain in zip(points, gains)
        for name, qps in (("dynamic", gain), ("static", 1.0))
    ]


def simulated(policy: str, qps: float, **more) -> dict:
    about = {"model": "llama-2-7b", "kv": "bf16", "kv_policy": policy, "predictor": "none", "slots": 256}
    return about | {"pool_gib": 16.0, "workload": "w", "qps": qps, "preemption_rate": 0.0} | more


def c5_rows(*times: float) -> list[dict]:
    """The first case has few keys, which decide nothing."""
    cells = [(1, 1024), *[(64, 1024)] * (len(times) - 1)]
    return [{"R": r, "length": n, "us": 100.0, "flash_us": 100 * t} for (r, n), t in zip(cells, times)]


def accuracy(added: float, *ends: float) -> dict:
    return {"part": "accuracy", "added": added, "added_95": list(ends or (added, added))}


def c8_rows(device: str = "A", **rounds: list[float]) -> list[dict]:
    """INT4 at batches b1, b64, b128: how many times as fast in each round."""
    rows = []
    for batch, times in rounds.items():
        for scheme, ms in (("bf16", [4.0] * len(times)), (c8.INT4, [4 / each for each in times])):
            row = {"scheme": scheme, "kv": "bf16", "batch": int(batch[1:]), "measured_on": device}
            rows.append(row | {"decode_ms": min(ms), "decode_ms_runs": ms, "over_bf16": 4 / min(ms)})
    return rows


def c9_rows(over: float, fp8: float = 1.1) -> list[dict]:
    """FP8's error over INT8's, and what a scale of a quarter makes of it."""
    rows = [{"part": "rounding", "of": "w", "which": "all", "fp8_over_int8": over, "squared": over**2}]
    for factor, int8_error, fp8_error in ((0.25, 9.0, fp8), (1.0, 1.0, 1.0), (4.0, 4.0, 1.0)):
        rows.append({"part": "scale", "of": "w", "factor": factor, "int8_error": int8_error, "fp8_error": fp8_error})
    return rows


def c10_rows(**errors: float) -> list[dict]:
    rows = [{"of": "w", "codes": "int8", "scale_for": s.strip("g"), "relative_error": e} for s, e in errors.items()]
    return [row | ({"kl": row["relative_error"]} if row["scale_for"] in ("8", "32") else {}) for row in rows]


def c11_rows(work: float, took: float, half: float = 0.0) -> list[dict]:
    step = {"prompts": 16, "work_saved": work, "time_saved": took, "time_saved_ci": half, "rounds": 3}
    return [step, *policies("ragged", "padded", 1.1)]


def c12_rows(*paged: tuple[float, float]) -> list[dict]:
    """Both models in 256 and in 1,024 slots, which serve what 256 do or less."""
    rows = []
    for model, served in zip(("llama-2-7b", "llama-3-8b"), paged):
        for slots, reserve, qps in zip((256, 1024), (10.0, 8.0), served):
            for policy, each in (("reserve", reserve), ("paged", qps)):
                rows.append(simulated(policy, each, model=model, slots=slots))
    return rows


def shares(key: str, *found: tuple[float, float]) -> list[dict]:
    """Shares with half of their intervals."""
    return [{key: share, f"{key}_ci": half, "rounds": 3} for share, half in found]


def c15_rows(kl: float, *ends: float, error: float = 0.1, added: float = 0.001) -> list[dict]:
    nf4 = {"codes": "nf4", "group": 32, "relative_error": error, "kl": kl, "added": added}
    nf4 |= {f"{key}_over_int4_95": list(ends) for key in ("kl", "added") if ends}
    return [nf4, {"codes": "int4", "group": 32, "relative_error": 0.2, "kl": 1.0, "added": 0.002}]


def c16_rows(stream: float, swap: float, gb_ms: float) -> list[dict]:
    row = {"source": "data sheet", "batch": 1, "stream_share": stream, "swap_over_recompute": swap}
    return [row | {"gb_ms": gb_ms, "step_ms": 10.0}, {"source": "data sheet", "batch": 0}, {"source": "measured"}]


def c17_rows(none: float) -> list[dict]:
    return [simulated("paged", none), simulated("paged", 10.0, predictor="oracle"),
            simulated("extent", 1.0, predictor="longest"), simulated("extent", 10.0, predictor="oracle")]  # fmt: skip


def c18_rows(off: float = 0.01, **ms: float) -> list[dict]:
    """Steps of none of the fusions take 4 ms."""
    case, runs = {"phase": "decode", "sequences": 1, "tokens": 8}, {"none": 4.0} | ms
    return [case | {"fused": name.replace("but_", c18.BUT), "step_ms": each + (off * at if name != "none" else 0),
                    "round": at} for name, each in runs.items() for at in (-1, 0, 1)]  # fmt: skip


def c19_row(compute: float, sample: float, back: float) -> dict:
    return {"phase": "decode", "batch": 1, "tokens": 8, "compute": compute, "sample": sample, "return": back}


def c20_rows(small: float, large: float) -> list[dict]:
    about = {"device": "NVIDIA A100 80 GB", "devices": 1, "kv": "bf16"}
    return [about | {"model": "llama-2-7b", "share": small}, about | {"model": "176B", "share": large}]


def c21_rows(*found: tuple[float, float], half: float = 0.0) -> list[dict]:
    """Returns the times of dequantizing once and ten times over that of the bytes, case by case."""
    row = {"over_bytes_ci": half, "rounds": 5}
    both = [pair for case in found for pair in zip((1, 10), case)]
    return [row | {"dequantized": times, "over_bytes": over} for times, over in both]


def c22_rows(cache: tuple[float, ...], flash: tuple[float, ...], mib: float = 1.0) -> list[dict]:
    rows = [{"part": "cache", "tokens": 8 * at, "times": times} for at, times in enumerate(cache)]
    memory = {"flash_mib": mib, "naive_mib": 2.0}
    return rows + [memory | {"part": "attention", "tokens": 8 * at, "times": t} for at, t in enumerate(flash)]


def c23_rows(completed: float, **found: float) -> list[dict]:
    """Forty a second are served all at once; at rates like r20 a share is in time, and a part of them is completed."""
    rates = {float(name[1:]): share for name, share in found.items()}
    at = [
        {"load": r / 40, "rate": r, "good_share": s, "qps": completed * r, "arrivals_s": 60} for r, s in rates.items()
    ]
    return [{"load": None, "rate": None, "qps": 40.0, "good_share": 0.1}, *at]


def c24_rows(*qps: float, source: str = "measured", part: str = "at once") -> list[dict]:
    """Merged steps' requests a second by slots, where separate ones serve ten; and worse steps of another size."""
    rows = []
    for slots, merged in enumerate(qps):
        for policy, best in (("merged", merged), ("separate", 10.0)):
            row = {"part": part, "policy": policy, "slots": slots, "source": source}
            rows += [row | {"qps": best}, row | {"qps": best / 2}]
    return rows


def c25_rows(fp8: float, int4: float, **more) -> list[dict]:
    """Steps whose INT8 ones take 1 ms, and requests; below batch 64 INT4 is quicker."""
    ms = {"fp8": fp8, "int8": 1.0, "int4": int4}
    rows = [{"part": "step", "format": name, "kind": kind, "batch": batch,
             "ms": 0.1 if name == "int4" and batch == 1 else each}
            for name, each in ms.items() for kind in ("decode", "prefill") for batch in (1, 64)]  # fmt: skip
    served = {"part": "requests", "slots": 8} | more
    return rows + [served | {"format": name, "qps": 1 / each} for name, each in ms.items()]


def c26_rows(*times: float) -> list[dict]:
    rows = []
    for length, each in enumerate(times):
        row = {"part": "full", "source": "measured", "input": length, "output": length}
        rows += [row | {"kv": "bf16", "tokens_s": 1.0}, row | {"kv": "int8-g8", "tokens_s": each}]
    return rows


def c28_rows(source: str = "measured", **static: float) -> list[dict]:
    dynamic = dict.fromkeys(c28.LATENCIES, 10.0) | {"source": source, "rate": 4.0}
    other = dynamic | dict.fromkeys(c28.LATENCIES, 20.0) | static
    return [dynamic | {"policy": "dynamic"}, other | {"policy": "static"}]


def c29_rows(*added: float) -> list[dict]:
    row = {"heads": 8, "kv_heads": 2, "parameters": 1}
    return [row | {"kv_heads": 8, "added": 0.0}, *(row | {"added": each} for each in added)]


def c32_rows(*steps: tuple[float, float]) -> list[dict]:
    return [{"billions": size, "ms": ms, "context": 128} for size, ms in steps]


def times_rows(*times: float) -> list[dict]:
    return [{"times": each} for each in times]


C6 = {"kv": "int8-g8"}
STEP, PRODUCT = {"part": "step"}, {"part": "product"}
SLOW = dict.fromkeys(c28.LATENCIES, 5.0)
ALL = c18_rows(all=2.0, norm=3.0, but_norm=2.5)

CASES: dict[str, list[tuple[list[dict], str, str]]] = {
    "C1": [(policies("dynamic", "static", ratio), *answer) for ratio, answer in (
        (3.2, (YES, "more")), (2.1, (YES, YES)), (2.0, (YES, OPEN)), (1.5, (YES, NO)), (1.01, (OPEN, NO)),
        (0.9, (NO, NO)),
    )] + [(policies("dynamic", "static", 1.03, rounds=1), OPEN, NO), (policies("dynamic", "x", 2.0), NOT_TESTED, ""),
        (c1_curve(2.2, 2.3, 0.9), YES, "mostly"), (policies("dynamic", "static", 1.3) + c1_curve(0.5), YES, NO),
        (policies("dynamic", "static", 1.3) + c1_curve(2.4, 2.4, source="measured"), YES, "mostly")],
    "C2": [([simulated("reserve", 1.0), simulated("reserve", 1.2), simulated("paged", qps)], *answer)
           for qps, answer in ((3.7, (YES, YES)), (2.0, (YES, NO)), (1.0, (NO, NO)))],
    "C3": [(policies("pipelined", "waiting", ratio), *answer) for ratio, answer in (
        (1.3, (YES, "more")), (1.09, (YES, YES)), (1.05, (YES, OPEN)), (1.0, (OPEN, NO)), (0.9, (NO, NO)),
    )],
    "C4": [(policies("threshold", "sort", ratio), *answer) for ratio, answer in (
        (1.3, (YES, "more")), (1.15, (YES, YES)), (1.04, (YES, NO)), (1.0, (OPEN, NO)), (0.9, (NO, NO)),
    )],
    "C5": [(c5_rows(9.0, *times), *answer) for times, answer in (
        ((2.1, 2.05), (YES, YES)), ((2.1, 2.2, 1.3), (YES, "mostly")), ((1.3,), (YES, NO)), ((1.051,), (OPEN, NO)),
        ((2.01,), (YES, OPEN)), ((1.0,), (NO, NO)),
    )],
    "C6": [([C6 | accuracy(*added) | {"times": times}], *answer) for added, times, answer in (
        ((0.001,), 2.1, (YES, YES)), ((0.001,), 1.6, (YES, NO)), ((0.001, 0.0, 0.004), 1.6, (OPEN, NO)),
        ((0.01,), 2.1, (NO, YES)), ((0.001,), 0.9, (NO, NO)),
    )],
    "C7": [([accuracy(*added), *(STEP | row for row in times_rows(*times)), PRODUCT | {"times": times[0]}], *answer)
           for added, times, answer in (
        ((0.01,), (2.1, 2.2), (YES, YES)), ((0.01,), (2.1, 1.3), (YES, "mostly")), ((0.01,), (1.3,), (YES, NO)),
        ((0.01,), (0.9,), (NO, NO)), ((0.1,), (2.1,), (NO, YES)), ((0.01, 0.0, 0.03), (2.1,), (OPEN, YES)),
    )] + [([accuracy(0.01)], NOT_TESTED, "")],
    "C8": [(rows, *answer) for rows, answer in (
        (c8_rows(b1=[2.0] * 3, b64=[1.4] * 3, b128=[1.1] * 3), (YES, YES)),
        (c8_rows(b1=[2.0] * 3, b64=[1.4] * 3, b128=[1.4] * 3), (YES, "mostly")),
        (c8_rows(b1=[1.2] * 3, b64=[1.1] * 3, b128=[1.4] * 3), (YES, NO)),
        (c8_rows(b1=[0.9] * 3, b64=[0.8] * 3, b128=[0.7] * 3), (NO, NO)),
        (c8_rows(b1=[0.9, 1.1, 1.05], b64=[0.9, 1.1, 1.05]), (OPEN, NO)),
        (c8_rows(b1=[2.0] * 3, b64=[2.0] * 3) + c8_rows("B", b1=[0.5] * 3), (YES, "mostly")),
    )],
    "C9": [(c9_rows(*given), *answer) for given, answer in (
        ((10.0,), (YES, YES)), ((4.0,), (YES, "mostly")), ((2.0, 9.0), (YES, NO)), ((0.9,), (NO, NO)),
    )],
    "C10": [(c10_rows(**errors), *answer) for errors, answer in (
        ({"g4": 1.0, "g8": 1.0, "g32": 2.0, "tensor": 3.0}, (YES, YES)),
        ({"g4": 0.5, "g8": 1.0, "g32": 2.0, "tensor": 3.0}, (YES, NO)),
        ({"g4": 0.5, "g8": 2.0, "g32": 1.0, "tensor": 3.0}, (NO, NO)),
        ({"g4": 0.5, "g8": 1.0, "g32": 2.0, "tensor": 0.9}, (NO, NO)),
    )],
    "C11": [(c11_rows(*given), *answer) for given, answer in (
        ((0.6, 0.55), (YES, YES)), ((0.6, 0.55, 0.1), (YES, "mostly")), ((0.3, 0.3), (YES, NO)),
        ((0.0, -0.1), (NO, NO)),
    )] + [([{"work_saved": 0.6}], NOT_TESTED, "")],
    "C12": [(c12_rows((15.0, 12.0), (10.0, 11.0)), NO, ""), (c12_rows((99.0, 9.0), (10.0, 10.2)), YES, ""),
            (c12_rows((10.0, 15.0), (15.0, 15.0)), NO, "")],
    "C13": [(shares("share", *found), *answer) for found, answer in (
        (((0.8, 0.01), (0.71, 0.0)), (YES, YES)), (((0.8, 0.01), (0.89, 0.02)), (YES, "mostly")),
        (((0.95, 0.01),), (YES, NO)), (((0.5, 0.1),), (OPEN, NO)), (((0.3, 0.01),), (NO, NO)),
    )],
    "C14": [(shares("prefill_share", *found), *answer) for found, answer in (
        (((0.02, 0.01),), (YES, YES)), (((0.1, 0.01),), (YES, OPEN)),
        (((0.02, 0.0), (0.05, 0.0), (0.3, 0.0)), (YES, "mostly")), (((0.5, 0.1),), (OPEN, NO)),
        (((0.6, 0.01),), (NO, NO)),
    )],
    "C15": [(c15_rows(0.5), YES, ""), (c15_rows(0.5, -0.1, 0.1), OPEN, ""), (c15_rows(0.5, -0.2, -0.1), YES, ""),
            (c15_rows(2.0, error=0.3), NO, ""), (c15_rows(2.0, added=0.003), NO, "")],
    "C16": [(c16_rows(*given), *answer) for given, answer in (
        ((0.05, 2.0, 20.0), (YES, YES)), ((0.05, 2.0, 5.0), (YES, NO)), ((0.5, 2.0, 5.0), (NO, NO)),
        ((0.05, 0.5, 20.0), (NO, YES)),
    )],
    "C17": [(c17_rows(7.0), YES, ""), (c17_rows(9.9), NO, "")],
    "C18": [(ALL, YES, YES), (c18_rows(all=2.0, norm=5.0), YES, NO), (c18_rows(all=2.0, norm=4.0), YES, OPEN),
            (c18_rows(all=2.0, norm=3.0, rotary=3.0, attention=5.0), YES, "mostly"),
            (c18_rows(all=4.0, norm=5.0), OPEN, NO),
            (c18_rows(all=5.0, norm=5.0), NO, NO), (c18_rows(all=2.0, norm=4.5, but_norm=2.5), YES, NO),
            ([row for row in ALL if row["fused"] == "none"], NOT_TESTED, "")],
    "C19": [([c19_row(*row)], *answer) for row, answer in (
        ((0.8, 0.1, 0.05), (YES, YES)), ((0.8, 0.1, 0.2), (YES, "mostly")), ((0.97, 0.01, 0.02), (YES, NO)),
        ((0.6, 0.01, 0.3), (YES, NO)), ((0.4, 0.1, 0.5), (NO, NO)),
    )],
    "C20": [(c20_rows(0.82, 0.51), YES, YES), (c20_rows(0.6, 0.51), YES, NO), (c20_rows(0.82, 0.4), NO, NO)],
    "C21": [(c21_rows((1.0, 1.1)), YES, YES), (c21_rows((1.0, 1.1), (1.0, 1.1), (1.0, 1.3)), YES, "mostly"),
            (c21_rows((1.0, 1.3)), YES, NO), (c21_rows((1.14, 1.3), half=0.02), OPEN, NO),
            (c21_rows((1.0, 1.14), half=0.02), YES, OPEN), (c21_rows((1.3, 2.5)), NO, NO)],
    "C22": [(c22_rows((2.0, 3.0), (2.0, 3.0)), YES, YES), (c22_rows((2.0, 1.95), (2.0, 2.03)), YES, OPEN),
            (c22_rows((2.0, 1.5), (2.0, 1.5)), YES, NO), (c22_rows((0.5, 0.6), (2.0, 3.0), mib=3.0), NO, YES),
            (c22_rows((2.0, 3.0), (2.0, 3.0, 2.0)), YES, "mostly")],
    "C23": [(c23_rows(0.8, r20=1.0, r28=0.995, r36=0.6), YES, YES), (c23_rows(0.7, r20=1.0, r28=0.995), YES, NO),
            (c23_rows(0.8, r36=1.0, r20=1.0, r28=0.9), YES, NO), (c23_rows(0.8, r20=0.9), NO, NO),
            (c23_rows(0.8), NOT_TESTED, "")],
    "C24": [(c24_rows(*qps, source=source), *answer) for qps, source, answer in (
        ((21.0,), "measured", (YES, YES)), ((10.5,), "measured", (YES, NO)), ((10.3,), "measured", (OPEN, NO)),
        ((9.0,), "measured", (NO, NO)), ((20.1,), "measured", (YES, OPEN)), ((10.3,), "simulated", (YES, NO)),
        ((10.1,), "simulated", (NO, NO)), ((20.0, 20.0, 11.0), "simulated", (YES, "mostly")),
    )] + [(c24_rows(10.3) + c24_rows(11.0, part="two policies"), YES, NO),
          (c24_rows(11.0) + c24_rows(30.0, part="shapes"), YES, NO), (c24_rows(12.0, part="shapes"), NOT_TESTED, "")],
    "C25": [(c25_rows(1.005, 1.3), YES, YES), (c25_rows(1.08, 1.3), YES, NO), (c25_rows(1.2, 0.9), NO, NO),
            (c25_rows(1.0, 1.3, fit_error=0.1), YES, "mostly"), (c25_rows(1.04, 1.035)[-3:], OPEN, OPEN),
            (c25_rows(1.0, 1.03, fit_error=0.02)[-3:], YES, YES), (c25_rows(1.0, 1.03, fit_error=0.2)[-3:], OPEN, OPEN),
            ([row for row in c25_rows(1.0, 2.0) if row["format"] != "int4"], NOT_TESTED, "")],
    "C26": [(c26_rows(1.5, 1.41), YES, YES), (c26_rows(1.34, 1.49, 1.53), YES, "mostly"), (c26_rows(1.5, 1.2), YES, NO),
            (c26_rows(1.0, 0.9), NO, NO)],
    "C27": [([{"batch": 1, "unwanted_shuffled": 0.0}, *({"batch": 8, "unwanted_shuffled": s} for s in found)], *answer)
            for found, answer in (
        ((0.5, 0.7), (YES, YES)), ((0.5, 0.7, 0.3), (YES, "mostly")), ((0.3,), (YES, NO)), ((0.01,), (NO, NO)),
    )],
    "C28": [(c28_rows(), YES, YES), (c28_rows(itl_ms_p99=5.0), YES, "mostly"),
            (c28_rows(itl_ms_p50=10.2), YES, "mostly"),
            (c28_rows(**dict.fromkeys(SLOW, 10.2)), OPEN, OPEN), (c28_rows(**SLOW), NO, NO),
            (c28_rows("simulated", **dict.fromkeys(SLOW, 10.2)), YES, YES),
            (c28_rows("simulated", **dict.fromkeys(SLOW, 10.0)), NO, NO), (c28_rows()[:1], NOT_TESTED, "")],
    "C29": [(c29_rows(0.01, 0.012, 0.011), YES, ""), (c29_rows(0.0, 0.02, 0.01), OPEN, ""),
            (c29_rows(0.03, 0.031, 0.032), NO, "")],
    "C30": [(times_rows(1.0, 1.1), YES, YES), (times_rows(1.0, 1.1, 0.8), YES, "mostly"),
            (times_rows(0.945), OPEN, OPEN), (times_rows(0.7), NO, NO)],
    "C31": [([{"part": part, "over_fused": fused, "over_library": library} for part, fused, library in rows], *answer)
            for rows, answer in (
        ([("bytes", 2.0, 1.5)], (YES, YES)), ([("bytes", 2.0, 1.5)] * 2 + [("bytes", 1.0, 1.5)], (YES, "mostly")),
        ([("bytes", 2.0, 1.5), ("time", 1.2, 0.9)], (NO, NO)),
    )],
    "C32": [(c32_rows((7, 20), (95, 45), (405, 90)), YES, YES), (c32_rows((7, 20), (70, 45)), YES, OPEN),
            (c32_rows((7, 20), (8, 20), (70, 60)), YES, "mostly"), (c32_rows((70, 50.2)), OPEN, OPEN),
            (c32_rows((70, 60)), NO, NO), (c32_rows((405, 10)), NOT_TESTED, "")],
}  # fmt: skip
# What is counted, computed or simulated has no noise; by C11's and C23's rules none decides the direction.
WITHOUT_NOISE = {"C2", "C9", "C10", "C11", "C12", "C16", "C17", "C19", "C20", "C22", "C23", "C26", "C27", "C31"}


@pytest.mark.parametrize(
    ("name", "rows", "answer"),
    [(name, rows, answer) for name, cases in CASES.items() for rows, *answer in cases],
    ids=[f"{name}-{at}" for name, cases in CASES.items() for at, _ in enumerate(cases)],
)
def test_planted_rows_decide(name, rows, answer):
    assert find(name).holds(rows) == tuple(answer)


def test_every_claim_can_come_out_either_way():
    for name in TITLES:
        answers = {direction for _, direction, _ in CASES[name]}
        assert {YES, NO} | (set() if name in WITHOUT_NOISE else {OPEN}) <= answers, name
        assert verdict_of(find(name), [])["direction"] == NOT_TESTED


@pytest.mark.parametrize("path", sorted(RESULTS.glob("claims-*.json")), ids=lambda path: path.stem)
def test_committed_verdicts_are_those_of_their_rows(path):
    document = json.loads(path.read_text(encoding="utf-8"))
    found = document["verdict"]
    assert found == verdict_of(find(found["claim"]), measured_rows(document))
    assert document["experiment"].startswith(f"claims-{found['claim']}")
    assert (document["complete"], document["size"]) == (True, "full")
    assert found["direction"] in (YES, NO, OPEN, NOT_TESTED)
    assert found["size"] in (YES, "more", "mostly", NO, OPEN, "")


def test_every_claim_has_a_committed_verdict():
    assert {path.stem.split("-")[1] for path in RESULTS.glob("claims-*.json")} == set(TITLES)


def test_noise_and_rounds_make_intervals():
    found = interval_of([1.0, 1.1, 0.9])
    assert (found.mean, found.half) == (pytest.approx(1.0), pytest.approx(4.303 * 0.1 / 3**0.5, rel=1e-3))
    assert [found.reaches(least) for least in (0.7, 1.0, 1.3)] == [True, None, False]
    assert [found.within(*ends) for ends in ((0.7, 1.3), (0.9, 1.3), (1.3, 2.0))] == [True, None, False]
    assert [interval_of([1.0], 0.1).reaches(least) for least in (0.8, 1.05, 1.2)] == [True, None, False]
    assert found.shown("{:.1f}", unit=" ms") == "1.0 ms (0.8 to 1.2)"
