"""What was estimated and simulated, and how far that is from what was measured."""

from collections.abc import Callable
from functools import partial
from typing import Any

from experiments.clusters import parse_args
from experiments.steps.links import read_link
from jllm.batch import make_buckets
from jllm.config import load_config
from tests.quotes.files import H100, ROOT, only, rows, spread


def estimated(model: str, exchange: str, *ranks: int) -> list[float]:
    """Milliseconds of a step at batch 1 on meshes."""
    wanted = {"part": "step", "model": model, "exchange": exchange, "batch": 1}
    return [only("meshes", "cpu", ranks=n, **wanted)["decode_ms"] for n in ranks]


def clusters(model: str, **wanted: Any) -> list[float]:
    """Simulated: requests a second all at once, and at a load the percentiles of first tokens and of those between."""
    once, loaded = (only(f"clusters_{model}", "cpu", load=load, **wanted) for load in (None, 0.7))
    return [once["qps"], *(loaded[f"{name}_ms_p{p}"] for name in ("ttft", "itl") for p in (50, 99))]


def full_steps() -> list[float]:
    """Prompt tokens of the sizes of steps; of the 70B's engines of two GPUs on eight and on 64 the longest milliseconds
    between tokens, and requests a second that one gets."""
    asked, wanted = parse_args([]), {"ranks": 2, "how": "merged", "load": 0.7}
    eight, more = (only(f"clusters_llama-2-70b{label}", "cpu", **wanted) for label in ("", "-64"))
    sizes = {b.tokens for b in make_buckets(eight["slots"], eight["slots"] + asked.step_tokens)}
    assert eight["slots"] == more["slots"]
    longest, rates = zip(*((row["itl_ms_max"], row["rate"] / row["engines"]) for row in (eight, more)))
    return [*sorted(sizes)[1:], *longest, *rates]


def by_mesh(model: str, ranks: int) -> list[float]:
    """The largest batch of a mesh, and tokens a second of 8 and of 64 GPUs, as round as the page has them."""
    own = [row for row in rows("meshes", "cpu", part="gpus", model=model, ranks=ranks) if row["exchange"] != "xla"]
    tokens = {row["gpus"]: row["tokens_s"] for row in own}
    return [own[0]["batch"], round(tokens[8], -2), round(tokens[64], -3)]


def eight_hosts() -> list[float]:
    """Times what one of them serves."""
    return [clusters(f"{model}-64")[0] / clusters(model, ranks=n, how="merged")[0]
            for model, n in (("llama-2-7b", 1), ("llama-2-70b", 2))]  # fmt: skip


def simulated_off_by(of: str, figure: str, gpus: int = 1, **wanted: int) -> tuple[float, float]:
    """Per cent, the least and the most of all files' figures; of one engine all that serve."""
    kinds, about = ("serving", "level") if of == "serving" else (of,), {"figure": figure, "gpus": gpus, **wanted}
    return spread([100 * row["off_by"] for kind in kinds for row in rows("simulation_error", "cpu", of=kind, **about)])


def apart_off_by(layers: int) -> list[float]:
    """Per cent by which 99th percentiles of prompts and decodes on GPUs of their own are too short: between tokens and
    of first tokens."""
    names = ("itl_ms_p99", "ttft_ms_p99")
    return [-percent for name in names for percent in simulated_off_by("level", name, 2, layers=layers, level=1)[::-1]]


def extrapolated_off_by() -> list[float]:
    """Per cent, the most by which exchanges of four ranks, extrapolated from two, differ from those that were timed."""
    table = read_link("h200-nvlink").all_reduce["peer"]
    timed = rows("all_reduce-four", H100, backend="peer")
    assert all(row["dtype"] == "bfloat16" for row in timed)
    off = [table.seconds(2 * row["M"] * row["E"], 4) * 1e6 / row["us_longer_chain"] - 1 for row in timed]
    return [100 * max(map(abs, off))]


def estimates_off_by(*wanted: tuple[str, str]) -> list[float]:
    """Per cent, the largest by device and backend."""
    found = {(row["device"], row["backend"]): row["largest"] for row in rows("hardware", "cpu", part="error")}
    return [100 * found[f"NVIDIA {device} SXM", backend] for device, backend in wanted]


def promised_by_slides() -> tuple[float, float]:
    found = [row for row in rows("hardware", "cpu", part="table") if row["backend"] != "xla" and row["memory_gb"] >= 24]
    assert all(row["slides_compute_ms"] < row["slides_ms"] for row in rows("hardware", "cpu", part="table"))
    return spread([row["slides_tokens_s"] / row["tokens_s"] for row in found])


def below_a_hundred_billion() -> list[float]:
    """Of C32: per cent added, measured steps, milliseconds of one sequence, cases of a full memory under 50 ms and in
    all, the others, and of these those with grouped queries."""
    checks = [row["measured_ms"] / row["estimated_ms"] for row in rows("claims-C32", "cpu", part="check")]
    found = [row for row in rows("claims-C32", "cpu", part="mesh") if row["billions"] < 100]
    late = [load_config(ROOT / f"configs/{r['model']}.json") for r in found if r["full_ms"] * max(checks) >= 50]
    grouped = sum(config.num_kv_heads < config.num_heads for config in late)
    one_ms = max(checks) * max(row["one_ms"] for row in found)
    return [100 * (max(checks) - 1), len(checks), one_ms, len(found) - len(late), len(found), len(late), grouped]


QUOTES: dict[str, Callable[[], Any]] = {
    "with steps of at most {:.0f} ms": lambda: [rows("meshes", "cpu", part="gpus")[0]["step_ms"]],
    "which comes within {:.0f} % of [four's]": extrapolated_off_by,
    "a step of the 70B should take {:.1f}, {:.1f} and {:.1f} ms": lambda: estimated("llama-2-70b", "peer", 2, 4, 8),
    "one of the 7B on two GPUs {:.1f} ms with XLA's exchange in place of {:.1f}": lambda: (
        estimated("llama-2-7b", "xla", 2) + estimated("llama-2-7b", "peer", 2)
    ),
    **{
        f"{name} | {{:,.0f}} | {{:.0f}} / {{:.0f}} | {{:.1f}} / {{:.1f}} |": partial(clusters, model, **wanted)
        for name, model, wanted in (
            ("LLaMA-2-7B | 8 of a GPU", "llama-2-7b", {"ranks": 1, "how": "merged"}),
            ("| | 4 of two GPUs", "llama-2-7b", {"ranks": 2, "how": "merged"}),
            ("2 for prompts and 6 for decodes", "llama-2-7b", {"how": "apart"}),
            ("LLaMA-2-70B | 4 of two GPUs", "llama-2-70b", {"ranks": 2, "how": "merged"}),
            ("2 of four GPUs", "llama-2-70b", {"ranks": 4, "how": "merged"}),
            ("1 for prompts and 3 for decodes", "llama-2-70b", {"how": "apart"}),
            ("| | 64 of a GPU", "llama-2-7b-64", {}),
            ("| | 32 of two GPUs", "llama-2-70b-64", {}),
        )
    },
    "more than {} tokens of prompts are computed as {:,} rows. The 70B's engines of two GPUs have such steps on eight "
    "GPUs too, where a token waits {:.0f} ms at most, for {:.0f} on 64; but there fewer than one in a hundred waits "
    "for one, as an engine gets {:.1f} requests a second for {:.1f} on 64": full_steps,
    **{
        f"{name} | {{:,.0f}} | {{:,.0f}} |": partial(by_mesh, model, ranks)
        for name, model, ranks in (
            ("an engine a GPU, batch {}", "llama-2-7b", 1),
            ("| | two GPUs, batch {}", "llama-2-7b", 2),
            ("| | eight GPUs, batch {}", "llama-2-7b", 8),
            ("| LLaMA-2-70B | two GPUs, batch {}", "llama-2-70b", 2),
            ("| | four GPUs, batch {}", "llama-2-70b", 4),
            ("eight GPUs, batch {}", "llama-2-70b", 8),
        )
    },
    "64 GPUs serve {:.1f} and {:.1f} times what eight do": eight_hosts,
    "of a mesh of two H100s or H200s come out {:.0f} % too fast to {:.0f} % too slow, of four {:.0f} to "
    "{:.0f} %": lambda: [
        abs(percent) for gpus in (2, 4) for percent in simulated_off_by("step", "decode_ms", gpus)
    ],
    "of an engine on each of two H100s {:.0f} % too low": lambda: [-simulated_off_by("replicas", "qps", 2)[0]],
    "two in one process are {:.0f} to {:.0f} % too high, with sixteen {:.0f} to {:.0f} %": lambda: [
        percent for layers in (8, 16) for percent in simulated_off_by("level", "qps", 2, layers=layers)
    ],
    "between tokens are {:.0f} to {:.0f} % too short with sixteen layers, of first tokens {:.0f} to {:.0f} % too "
    "short": lambda: apart_off_by(16),
    "and with eight {:.0f} to {:.0f} and {:.0f} to {:.0f} %": lambda: apart_off_by(8),
    "on one GPU from {:.0f} % too low to {:.0f} % too high": lambda: [
        sign * percent for sign, percent in zip((-1, 1), simulated_off_by("serving", "qps"), strict=True)
    ],
    "of first tokens by up to {:.0f} % and between tokens by up to {:.0f} %": lambda: [
        -simulated_off_by("serving", f"{name}_ms_p99")[0] for name in ("ttft", "itl")
    ],
    "that of first tokens is {:.1f} times what was measured": lambda: [
        1 + simulated_off_by("serving", "ttft_ms_p99")[1] / 100
    ],
    "and where 1.1 times as many do, a queue grows too soon: first tokens take {:.1f} times as long in the "
    "middle": lambda: [
        1 + only("simulation_error", "cpu", of="serving", figure="ttft_ms_p50", load=1.1)["off_by"]
    ],
    "It is within {:.0f} % of an H100's steps, of which it has seen none, and within {:.0f} % of an H200's, {:.0f} % "
    "with Triton's kernels and {:.0f} % with plain XLA": lambda: estimates_off_by(
        ("H100", "mosaic"), *(("H200", backend) for backend in ("mosaic", "triton", "xla"))
    ),
    "24 GB are there, the slides promise {:.2f} to {:.2f} times as many tokens a second": promised_by_slides,
    "With {:.0f} % added, the most that one of {} measured steps took over its estimate, models below 100 billion "
    "parameters decode one sequence in at most {:.0f} ms on whatever H200s or H100s hold them, and a batch that fills "
    "the memory in under 50 ms in {} of {} cases (`python -m experiments.claims C32`). To read a full memory takes "
    "less than that; of the other {} cases {} are of models with grouped queries": below_a_hundred_billion,
    "on an H200 that was {:.0f} to {:.0f} % too high": lambda: (
        spread([100 * row["sim_error"] for row in rows("kv_measured")])
    ),
}  # fmt: skip
