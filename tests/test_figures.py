"""Figures that README.md, docs/ and the documents beside results quote are those of the committed results.

`QUOTES` has each sentence with figures, and what the newest files say: a sentence whose figures are others fails, with
what it should say. A measured figure of these pages that is in none of the sentences fails too.
"""

import re
from collections.abc import Callable
from functools import cache, partial
from itertools import product
from statistics import mean
from typing import Any

import pytest

from experiments import train_card
from experiments.accuracy import report as accuracy_report
from experiments.report.documents import RESULTS, read_result
from experiments.report.judged import judged
from experiments.texts.read import BUNDLED_TEXT, read_documents

ROOT = RESULTS.parents[1]
Rows = list[dict[str, Any]]


@cache
def result(experiment: str, device: str = "h200") -> dict[str, Any]:
    """The newest file of that name, as it is to be read: shares are of the floors of today."""
    return judged(read_result(sorted(RESULTS.glob(f"{experiment}-{'[0-9]' * 8}-{device}.json"))[-1]))


def rows(experiment: str, device: str = "h200", **wanted: Any) -> Rows:
    found = [row for row in result(experiment, device)["rows"] if wanted.items() <= row.items()]
    assert found, f"{experiment} has no row with {wanted}"
    return found


def only(experiment: str, device: str = "h200", **wanted: Any) -> dict[str, Any]:
    (row,) = rows(experiment, device, **wanted)
    return row


def accuracy(name: str, scheme: str, kv: str = "model") -> float:
    return only("quant_accuracy", "cpu", scheme=scheme, kv=kv, part="scheme")[name]


def times_as_fast(scheme: str, kind: str, least: int = 0) -> dict[int, float]:
    """Tokens of a step -> times as fast as bf16, with a 16-bit cache."""
    steps = [row for row in rows("quant_steps", scheme=scheme, kv="bf16") if f"{kind}_ms" in row]
    return {row["T"]: row["over_bf16"] for row in steps if row["T"] >= least}


def spread(values: Any) -> tuple[float, float]:
    return min(values), max(values)


def ratio(method: str, model: str) -> float:
    (row,) = [row for row in rows("ptq_methods", "cpu", method=method, model=model) if row["scheme"] != "w4a16-g128"]
    return row["ratio"]


def left_by_llm_int8() -> tuple[float, float]:
    """Of w8a8's divergence beside the strongest outliers, by three seeds of these."""
    found = []
    for experiment in ("outliers", "outliers-seed1", "outliers-seed2"):
        strongest = rows(experiment, "cpu", part="strength", strength=64, smooth=False)
        kl = {row["scale"]: row["kl"] for row in strongest}
        found.append(kl["outliers"] / kl["token"])
    return spread(found)


def trainings() -> list[float]:
    """Of the larger subject and of the bundled model, on the same held-out book."""
    subject = result("train_small", "h100-80gb-hbm3")
    losses = [subject["valid_loss"], subject["valid_bits_per_byte"], result("train_small")["valid_bits_per_byte"]]
    assert subject["valid_bytes"] == result("train_small")["valid_bytes"]
    return losses


def better_with(count: int) -> float:
    """Nats a token that models with fewer KV heads are better by, the mean of seeds, of which each is."""
    added = [row["added"] for row in rows("claims-C29", "cpu", kv_heads=count)]
    assert max(added) < 0
    return -mean(added)


def of_the_subject(method: str) -> float:
    """Of rounding's divergence, the mean of seeds."""
    kl = [row["kl"] for row in rows("ptq_methods_subject_plain", "cpu", method=method)]
    return mean(kl) / only("ptq_methods_subject_plain", "cpu", method="round")["kl"]


def left_of_the_subject() -> float:
    """By rotating 4-bit K and V of the larger subject: the most of all formats and seeds."""
    kl = {(row["kv"], row["seed"]): row["kl"] for row in rows("rotations-subject", "cpu", strength=32)}
    return max(value / kl[name.removesuffix("-h"), seed] for (name, seed), value in kl.items() if name.endswith("-h"))


H100 = "h100-80gb-hbm3"
BF16, W8A8 = "llama-2-7b_bf16_kv-bf16", "llama-2-7b_w8a8_kv-int8-g8"


def decoded(model: str, *batches: int, device: str = H100) -> list[float]:
    """Milliseconds of decode steps, 8 -> 256."""
    found = (rows(f"throughput_{model}", device, batch=batch, input=8) for batch in batches)
    return [row["decode_ms"] for of_batch in found for row in of_batch if "peer" not in row]


def shares(model: str, *batches: int) -> list[float]:
    """Per cent of those steps that their floors are."""
    found = (rows(f"throughput_{model}", H100, batch=batch, input=8) for batch in batches)
    return [100 * row["floor_fraction"] for of_batch in found for row in of_batch if "peer" not in row]


def beside_vllm(batch: int) -> list[float]:
    """Ours, its share of the floor, and vLLM's in the same job, in 16 and in 8 bits."""
    theirs = [only(f"throughput_{model}", H100, batch=batch, peer="vLLM")["decode_ms"] for model in (BF16, W8A8)]
    ours = [[*decoded(model, batch), *shares(model, batch)] for model in (BF16, W8A8)]
    return [*ours[0], theirs[0], *ours[1], theirs[1]]


def times_vllm(model: str) -> tuple[float, float]:
    """How many times as long its steps take, over the batches that both ran."""
    theirs = {row["batch"]: row["decode_ms"] for row in rows(f"throughput_{model}", H100, peer="vLLM")}
    ours = {row["batch"]: row["decode_ms"] for row in rows(f"throughput_{model}", H100, input=8) if "peer" not in row}
    return spread([theirs[batch] / ours[batch] for batch in theirs.keys() & ours.keys()])


def served_here(scheme: str) -> list[float]:
    """Requests a second, and the mean of vLLM's in the same job."""
    found = rows(f"qps_llama-2-7b_{scheme}", H100)
    return [next(row["qps"] for row in found if "peer" not in row), mean([r["qps"] for r in found if "peer" in r])]


def estimated(model: str, exchange: str, *ranks: int) -> list[float]:
    """Milliseconds of a step at batch 1 on meshes."""
    wanted = {"part": "step", "model": model, "exchange": exchange, "batch": 1}
    return [only("meshes", "cpu", ranks=n, **wanted)["decode_ms"] for n in ranks]


def clusters(model: str, **wanted: Any) -> list[float]:
    """Simulated: requests a second all at once, and at a load the percentiles of first tokens and of those between."""
    once, loaded = (only(f"clusters_{model}", "cpu", load=load, **wanted) for load in (None, 0.7))
    return [once["qps"], *(loaded[f"{name}_ms_p{p}"] for name in ("ttft", "itl") for p in (50, 99))]


def exchanges(experiment: str, backend: str, *sizes: int) -> list[float]:
    """Microseconds between two GPUs."""
    return [only(experiment, "h100-80gb-hbm3", backend=backend, M=m)["us"] for m in sizes]


def on_two(devices: int) -> list[float]:
    found = {row["batch"]: row["decode_ms"] for row in rows("decode_step-two", "h100-80gb-hbm3", devices=devices)}
    return [found[batch] for batch in (1, 16, 64, 512)]


def by_mesh(model: str, ranks: int) -> list[float]:
    """The largest batch of a mesh, and tokens a second of 8 and of 64 GPUs, as round as the page has them."""
    own = [row for row in rows("meshes", "cpu", part="gpus", model=model, ranks=ranks) if row["exchange"] != "xla"]
    tokens = {row["gpus"]: row["tokens_s"] for row in own}
    return [own[0]["batch"], round(tokens[8], -2), round(tokens[64], -3)]


def eight_hosts() -> list[float]:
    """Times what one of them serves."""
    return [clusters(f"{model}-64")[0] / clusters(model, ranks=n, how="merged")[0]
            for model, n in (("llama-2-7b", 1), ("llama-2-70b", 2))]  # fmt: skip


def simulated_off_by(of: str, figure: str, gpus: int = 1) -> tuple[float, float]:
    """Per cent, the least and the most of all files' figures; of one engine all that serve."""
    kinds = ("serving", "level") if of == "serving" else (of,)
    found = [
        row["off_by"] for kind in kinds for row in rows("simulation_error", "cpu", of=kind, figure=figure, gpus=gpus)
    ]
    return spread([100 * error for error in found])


def beside_torch() -> list[float]:
    found = rows("throughput_llama-2-7b_bf16_kv-bf16-peers", input=8)
    ours = {row["batch"]: row["decode_ms"] for row in found if "peer" not in row}
    theirs = {row["batch"]: row["decode_ms"] for row in found if "peer" in row}
    return [ms for batch in (1, 32, 128) for ms in (ours[batch], theirs[batch])]


def attention() -> list[float]:
    found = [row for row in rows("claims-C5", H=32, K=32) if row["R"] * row["length"] >= 65_536]
    return [*spread([row["over_cudnn"] for row in found]), *spread([row["over_flash"] for row in found])]


def starts(device: str) -> tuple[float, ...]:
    """The cold start, and the fastest and the slowest warm one."""
    seconds = {kind: [row["start_s"] for row in rows("start_up", device, start=kind)] for kind in ("cold", "warm")}
    return max(seconds["cold"]), *spread(seconds["warm"])


def tracing(seconds: Callable[[dict[str, Any]], float]) -> tuple[float, float]:
    """Of the least and the most that one step takes."""
    return spread([seconds(row) for row in rows("step_tracing", "cpu")])


def unharmed(scheme: str, kv: str) -> tuple[str]:
    low, high = accuracy("added_95", scheme, kv)  # type: ignore[misc]
    return ("nothing measurable" if low < 0 < high else "something",)


def per_channel() -> list[float]:
    found = {row["kv"]: 100 * row["added"] for row in rows("quant_accuracy-kivi", "cpu", part="scheme")}
    return [found[kv] for kv in ("kivi2-g32", "kivi2-g32-r32", "int4-g32", "int2-g32-zp")]


def left_of_kv(suffix: str) -> float:
    """What a 4-bit format with this suffix leaves of the divergence without it, beside outliers; the worst seed."""
    found = {row["kv"] + f" {row['seed']}": row["kl"] for row in rows("rotations", "cpu", part="kv", strength=8.0)}
    return max(found[f"int4-g64{suffix} {seed}"] / found[f"int4-g64 {seed}"] for seed in range(3))


def left_by_channels(kv: str, strength: float, alpha: float = 0.5) -> float:
    """Of a KV format's divergence, what scales of channels that are found ahead leave; the worst seed."""
    of = rows("rotations-smooth", "cpu", part="smooth", kv=kv, strength=strength)
    found = {(row["alpha"], row["seed"]): row["kl"] for row in of}
    return max(found[alpha, seed] / found[0.0, seed] for some, seed in found if some == alpha)


def in_blocks(end: str) -> list[float]:
    names = (f"{kind}{end}" for kind in ("mxfp8", "nvfp4", "mxfp4"))
    return [only("quant_accuracy-blocks", "cpu", part="scheme", scheme=name)["kl"] for name in names]


def beside_mosaic() -> list[float]:
    """Decode steps under triton over the device's own, by batch."""
    ms = {(row["backend"], row["batch"]): row["decode_ms"] for row in rows("decode_step-triton")}
    return [ms["triton", batch] / ms["default", batch] for batch in (16, 64, 128)]


def cost_of_one_order() -> tuple[float, float]:
    """Per cent that `deterministic=True` adds to a decode step: at batch 1, and at most from 16 on."""
    ms = {(row["backend"], row["batch"]): row["decode_ms"] for row in rows("decode_step-deterministic")}
    more = {batch: 100 * (ms["deterministic", batch] / ms["default", batch] - 1) for batch in (1, 16, 64, 128, 256)}
    return more.pop(1), max(more.values())


def attention_beside_mosaic() -> tuple[float, float]:
    found = rows("decode_attention-triton", kernel="decode_attention", kv="bf16")
    us = {(row["peer"], row["K"], row["R"]): row["us"] for row in found}
    return spread([us["triton", *cell] / took for (peer, *cell), took in us.items() if peer == "mosaic"])


def codes_beside_mosaic() -> tuple[float, float]:
    """With the configuration that runs."""
    found = rows("decode_attention-triton-tuned", "h100-80gb-hbm3", kernel="decode_attention")
    us = {(row["peer"], row["kv"]): row["us"] for row in found}
    chosen = "triton split=512 warps=2 stages=5"
    return spread([us[chosen, kv] / took for (peer, kv), took in us.items() if peer == "mosaic"])


def steps_over(*formats: str) -> list[float]:
    found = [only(f"decode_step-{kv}", "h100-80gb-hbm3", batch=64) for kv in formats]
    return [row["decode_ms"] for row in found]


def over_64_rows(*formats: str) -> list[float]:
    """Microseconds of decode attention."""
    cell = {"kernel": "decode_attention", "R": 64}
    return [only("decode_attention-zp", "h100-80gb-hbm3", **cell, kv=kv)["us"] for kv in formats]


def estimates_off_by(*wanted: tuple[str, str]) -> list[float]:
    """Per cent, the largest by device and backend."""
    found = {(row["device"], row["backend"]): row["largest"] for row in rows("hardware", "cpu", part="error")}
    return [100 * found[f"NVIDIA {device} SXM", backend] for device, backend in wanted]


def promised_by_slides() -> tuple[float, float]:
    found = [row for row in rows("hardware", "cpu", part="table") if row["backend"] != "xla" and row["memory_gb"] >= 24]
    assert all(row["slides_compute_ms"] < row["slides_ms"] for row in rows("hardware", "cpu", part="table"))
    return spread([row["slides_tokens_s"] / row["tokens_s"] for row in found])


def below_a_hundred_billion() -> list[float]:
    """Of C32: per cent added, milliseconds of one sequence, and cases of a full memory under 50 ms and in all."""
    checks = [row["measured_ms"] / row["estimated_ms"] for row in rows("claims-C32", "cpu", part="check")]
    found = [row for row in rows("claims-C32", "cpu", part="mesh") if row["billions"] < 100]
    under = sum(row["full_ms"] * max(checks) < 50 for row in found)
    assert len(checks) == 10
    return [100 * (max(checks) - 1), max(checks) * max(row["one_ms"] for row in found), under, len(found)]


def with_the_head() -> list[float]:
    found = rows("quant_accuracy-head", "cpu", part="scheme", kv="model")
    return [row["kl"] for scheme in ("w8a8-all", "w8a8-head") for row in found if row["scheme"] == scheme]


def found_beside_outliers() -> list[float]:
    """The shares of needles found beside the largest outliers: in 4 bits with one scale a head, with four, and at least
    with 8 bits and rotated."""
    found = {row["kv"]: row["accuracy"] for row in rows("long_context", "cpu", part="outlier", strength=32.0)}
    rest = [share for kv, share in found.items() if kv.endswith("-h") or not kv.startswith("int4")]
    return [found["int4-g128"], found["int4-g32"], min(rest)]


def beside_rounding(name: str, method: str) -> list[float]:
    """Divergence over rounding's of blocks of 4-bit floats, mean of seeds, by format."""
    found = rows(name, "cpu")
    kl = {key: mean(row["kl"] for row in found if (row["scheme"], row["method"]) == key)
          for key in product(("mxfp4", "nvfp4"), ("round", method))}  # fmt: skip
    return [kl[scheme, method] / kl[scheme, "round"] for scheme in ("mxfp4", "nvfp4")]


def left_by_rotations(*which: str) -> list[float]:
    found = rows("rotations-learned", "cpu", part="learned", scheme="mxfp4")
    kl = {name: mean(row["kl"] for row in found if row["rotate"] == name) for name in ("none", *which)}
    return [kl[name] / kl["none"] for name in which]


QUOTES: dict[str, Callable[[], Any]] = {
    "costs the bundled model {:.3f} nats a token, `nvfp4-weight` {:.3f} and `mxfp4-weight` {:.3f};": lambda: (
        in_blocks("-weight")
    ),
    "with activations {:.3f}, {:.3f} and {:.3f}.": lambda: in_blocks(""),
    "leaves at most {:.2f} of `int4-g64`'s divergence, and `-zp` {:.2f}": lambda: [left_of_kv("-h"), left_of_kv("-zp")],
    "{:.2f} of the divergence of `int4-g64` K and V of the bundled model, and of `int4-g64-zp` {:.2f}": lambda: [
        left_by_channels(kv, 1.0) for kv in ("int4-g64", "int4-g64-zp")
    ],
    "with outliers 32 times as large as others {:.2f} or less.": lambda: [left_by_channels("int4-g64", 32.0)],
    "32 times as large as other channels a share of {:.2f} is found with `int4-g128`, {:.2f} with `int4-g32`, and "
    "{:.2f} or more with": found_beside_outliers,
    "Beside outliers 64 times as large as others, planted by three seeds, it leaves {:.3f} to {:.3f} of `w8a8-all`'s": (
        left_by_llm_int8
    ),
    "The shapes of {} published models are in": lambda: [len(list((ROOT / "configs").glob("*.json")))],
    "{:.4f} nats a token for `w8a8`, {:.3f} for `fp8`, {:.3f} for `nf4`, {:.3f} for `w4a16-g128`": lambda: [
        accuracy("kl", scheme) for scheme in ("w8a8-talk", "fp8", "nf4", "w4a16-g128")
    ],
    "with O {:.5f} nats a token (`w8a8-all`), and with the head, whose roundings no layer averages, {:.5f} (": (
        with_the_head
    ),
    "`w8a8` prefills {:.2f} to {:.2f} times as fast as bf16 from 512 tokens a step on": lambda: (
        spread(times_as_fast("w8a8-talk", "prefill", 512).values())
    ),
    "and decodes {:.2f} to {:.2f} times as fast over a 16-bit cache": lambda: (
        spread(times_as_fast("w8a8-talk", "decode").values())
    ),
    "`w4a16-g128` {:.2f} times at batch 1 and {:.2f} times at 256": lambda: [
        times_as_fast("w4a16-g128", "decode")[batch] for batch in (1, 256)
    ],
    "never saw with {:.2f} nats a token of its own vocabulary: {:.3f} bits a byte, for {:.3f} of the bundled model": (
        trainings
    ),
    "With outliers 32 times as large as others planted into its K and V, rotated formats of 4 bits leave at most "
    "{:.3f} of the divergence": lambda: [left_of_the_subject()],
    "rounding's divergence with 4-bit weights GPTQ leaves {:.2f} there and AWQ {:.2f} (": lambda: [
        of_the_subject(method) for method in ("gptq", "awq")
    ],
    "two KV heads of eight are better by {:.3f} nats a token than those with eight, and those with one by {:.3f},": (
        lambda: [better_with(2), better_with(1)]
    ),
    "divergence falls to {:.2f} (GPTQ) and {:.2f} (AWQ) of rounding's": lambda: [
        ratio(method, "plain") for method in ("gptq", "awq")
    ],
    "there AWQ leaves {:.2f} and SmoothQuant {:.3f} of rounding's divergence": lambda: [
        ratio(method, "planted") for method in ("awq", "smoothquant")
    ],
    "while without outliers SmoothQuant costs {:.1f} %": lambda: [100 * (ratio("smoothquant", "plain") - 1)],
    "W8A8 of every linear adds {:.2f} % to perplexity": lambda: [100 * accuracy("added", "w8a8-all")],
    "an int8-g8 cache {};": lambda: unharmed("bf16", "int8-g8"),
    "takes {:.2f} ms at batch 1, {:.2f} at 64 and {:.2f} at 256, {:.0f}, {:.0f} and {:.0f} % of what bytes": lambda: (
        decoded(BF16, 1, 64, 256) + shares(BF16, 1, 64, 256)
    ),
    "an int8-g8 cache {:.2f}, {:.2f} and {:.2f}, {:.0f}, {:.0f} and {:.0f} %, with `w4a16-g128` {:.2f} at": lambda: (
        decoded(W8A8, 1, 64, 256) + shares(W8A8, 1, 64, 256) + decoded("llama-2-7b_w4a16-g128_kv-bf16", 1)
    ),
    "LLaMA-3-8B takes {:.2f}, {:.2f} and {:.1f} at 1, 128 and 512": lambda: (
        decoded("llama-3-8b_bf16_kv-bf16", 1, 128, 512)
    ),
    "vLLM 0.26 takes {:.2f} to {:.2f} times as long in bf16, and in fp8 {:.2f} to {:.2f} times": lambda: (
        times_vllm(BF16) + times_vllm(W8A8)
    ),
    "steps in bf16 took {:.2f}, {:.2f} and {:.1f} ms at batch 1, 64 and 512": lambda: (
        decoded(BF16, 1, 64, 512, device="h200")
    ),
    "a step took {:.2f} ms for {:.2f} at batch 1, {:.2f} for {:.2f} at 32 and {:.2f} for {:.2f} at 128": beside_torch,
    **{
        f"| {n} | {{:.2f}} | {{:.0f}} % | {{:.2f}} | {{:.2f}} | {{:.0f}} % | {{:.2f}} |": partial(beside_vllm, n)
        for n in (1, 16, 64, 256)
    },
    "are served at {:.1f} requests a second, for {:.1f} by vLLM (a run each), and in `w8a8` with int8-g8 K and V at "
    "{:.1f} (a run), for {:.1f} by vLLM in fp8 (the mean of two)": lambda: (
        served_here("bfloat16") + served_here("w8a8_kv-int8-g8")
    ),
    "are served at {:.1f} a second on an H100, where {:.0f} of them run at once on average": lambda: [
        served_here("bfloat16")[0],
        only("qps_llama-2-7b_bfloat16", H100, scheme="bfloat16")["running_mean"],
    ],
    "over an int8-g8 cache at {:.1f} (": lambda: served_here("w8a8_kv-int8-g8")[:1],
    "on an H200 they were at {:.1f} and {:.1f}, means of two runs.": lambda: [
        only(f"qps_llama-2-7b_{scheme}", repeat="mean")["qps"] for scheme in ("bfloat16", "w8a8_kv-int8-g8")
    ],
    "in bf16 an H100 idles for {:.1f} % of the time at batch 1": lambda: [
        100 * only("step_profile_serve", H100, kind="gap")["share"]
    ],
    "and in `w8a8` for {:.1f} % by a profile": lambda: [
        100 * only("step_profile_serve-w8a8", H100, kind="gap")["share"]
    ],
    "reads at {:.2f} to {:.2f} of the rate of cuDNN's on contiguous keys from 65,536 keys and 32 KV heads on, and is "
    "{:.2f} to {:.2f} times as fast there as FlashAttention-2": attention,
    "on an H200: {0:.1f} s cold and {2:.1f} s warm for sixteen sizes": lambda: starts("h200"),
    "for Hopper hold its lock for {:.1f} to {:.1f} s, so": lambda: tracing(lambda row: row["trace_s"] + row["lower_s"]),
    "and a step holds the lock for {:.2f} to {:.2f} s": lambda: tracing(lambda row: row["taken_in_s"]),
    "on two CPU cores: {:.1f} and {:.1f} to {:.1f} s for twelve": lambda: starts("cpu"),
    "takes {:.2f}, {:.2f} and {:.2f} times that of Mosaic's kernels at batch 16, 64 and 128": beside_mosaic,
    "at batch 64 over `int8-g8-zp` K and V takes {:.1f} ms with Triton's and {:.1f} with XLA's": lambda: [
        only("decode_step-triton-zp", "h100-80gb-hbm3", backend=backend)["decode_ms"] for backend in ("triton", "xla")
    ],
    "in bf16 {:.1f} % slower at batch 1, and {:.1f} % at most from 16 to 256": cost_of_one_order,
    "in bf16 takes {:.2f} to {:.2f} times as long;": attention_beside_mosaic,
    "and 32 KV heads {:.2f} to {:.2f} times (": codes_beside_mosaic,
    "attention over `int4-g128` takes {:.0f} us a layer, over `int4-g128-zp` {:.0f}, over `int4-g32` {:.0f} and over "
    "`int4-g32-h` {:.0f} (": lambda: over_64_rows("int4-g128", "int4-g128-zp", "int4-g32", "int4-g32-h"),
    "at batch 64 and a context of 256 tokens {:.2f} ms over `int4-g32` and {:.2f} over `int4-g32-h`": lambda: (
        steps_over("int4-g32", "int4-g32-h")
    ),
    "with steps of at most {:.0f} ms": lambda: [rows("meshes", "cpu", part="gpus")[0]["step_ms"]],
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
    "| `peer`, one shot | {:.1f} | {:.1f} | {:.1f} | {:.1f} | {:.0f} |": lambda: (
        exchanges("all_reduce", "peer", 1, 16, 64, 512, 4096)
    ),
    "| XLA | | | {:.1f} | {:.1f} | {:.0f} |": lambda: exchanges("all_reduce-xla", "xla", 64, 512, 4096),
    "| one, ms | {:.2f} | {:.2f} | {:.2f} | {:.1f} |": lambda: on_two(1),
    "| two, ms | {:.2f} | {:.2f} | {:.2f} | {:.1f} |": lambda: on_two(2),
    "with blocks of 32 has at most {:.4f} of the divergence": lambda: [
        next(bar["value"] for bar in result("rotations-channel", "cpu")["bars"] if "2 bits" in bar["name"])
    ],
    "with scales for groups of what O and down read {:.5f} (": lambda: [
        only("quant_accuracy-groups", "cpu", part="scheme", scheme="w8a8-groups")["kl"]
    ],
    "64 GPUs serve {:.1f} and {:.1f} times what eight do": eight_hosts,
    "steps of a mesh of two H100s come out {:.0f} % too fast to {:.0f} % too slow": lambda: (
        [abs(x) for x in simulated_off_by("step", "decode_ms", 2)]
    ),
    "on one GPU throughput {:.0f} to {:.0f} % too high": lambda: simulated_off_by("serving", "qps"),
    "by {1:.0f} to {0:.0f} % of first tokens and {3:.0f} to {2:.0f} % between tokens": lambda: [
        -percent for name in ("ttft", "itl") for percent in simulated_off_by("serving", f"{name}_ms_p99")
    ],
    "It is within {:.0f} % of an H100's steps, of which it has seen none, and within {:.0f} % of an H200's, {:.0f} % "
    "with Triton's kernels and {:.0f} % with plain XLA": lambda: estimates_off_by(
        ("H100", "mosaic"), *(("H200", backend) for backend in ("mosaic", "triton", "xla"))
    ),
    "24 GB are there, the slides promise {:.2f} to {:.2f} times as many tokens a second": promised_by_slides,
    "With {:.0f} % added, the most that one of ten measured steps took over its estimate, models below 100 billion "
    "parameters decode one sequence in at most {:.0f} ms on whatever H200s or H100s hold them, and a batch that fills "
    "the memory in under 50 ms in {} of {} cases": below_a_hundred_billion,
    "On the bundled model `kivi2-g32` adds {:.1f} % to perplexity and `kivi2-g32-r32` {:.1f} % at 0.375 bytes a value "
    "(tails apart); `int4-g32` {:.1f} % at 0.56, and 2 bits per token (`int2-g32-zp`) {:.0f} %": per_channel,
    "with outliers in the residual stream it leaves {:.2f} of rounding's divergence in `mxfp4` and {:.2f} in `nvfp4`, "
    "rotated blocks alone {:.2f} and {:.2f}": lambda: [
        *beside_rounding("ptq_methods_fp4_stream", "mr-gptq"), *beside_rounding("ptq_methods_fp4_stream", "h")
    ],
    "rotated blocks lose to blocks as they are, {:.1f} and {:.1f} to one": lambda: (
        beside_rounding("ptq_methods_fp4", "h")
    ),
    "it leaves {:.2f} of the divergence of `mxfp4`, and Hadamard rotations {:.2f}": lambda: (
        left_by_rotations("learned", "all")
    ),
    "on an H200 that was {:.0f} to {:.0f} % too low": lambda: (
        spread([-100 * row["sim_error"] for row in rows("kv_measured")])
    ),
}  # fmt: skip
BATCHES = ("| M | 1 | 16 | 64 | 512 | 4096 |", "| batch | 1 | 16 | 64 | 512 |")  # heads of tables
UNITS = r" ?(?:%|ms|us|s|times|nats|GiB|MiB)(?!\w)| (?:a second|of rounding|of the rate)"
MEASURED = re.compile(  # a number and its unit, one of many digits, or one that is a cell of a table
    rf"\d(?:[\d.,]*\d)?(?:{UNITS})|(?<![\w.])(?<!vLLM )0\.\d\d+|\| (?:\d[\d ]*[.,/][\d.,/ ]*|\d{{3,}})(?= \|)"
)


def prose(text: str) -> str:
    """Words in a row, without blocks of code."""
    return " ".join(re.sub(r"^```.*?^```", "", text, flags=re.MULTILINE | re.DOTALL).split())


PAGES = {path: prose(path.read_text(encoding="utf-8")) for path in (ROOT / "README.md", *(ROOT / "docs").glob("*.md"))}


@pytest.mark.parametrize(("sentence", "figures"), QUOTES.items(), ids=range(len(QUOTES)))
def test_a_page_quotes_what_the_files_say(sentence, figures):
    assert any(sentence.format(*figures()) in page for page in PAGES.values())


@pytest.mark.parametrize("path", PAGES, ids=lambda path: path.stem)
def test_every_measured_figure_of_a_page_is_held_to_a_file(path):
    """Nothing but the sentences of QUOTES has a number and a unit, or a number alone in a cell."""
    left = PAGES[path]
    for heads in BATCHES:
        left = left.replace(heads, "")
    for sentence, figures in QUOTES.items():
        left = left.replace(sentence.format(*figures()), "")
    assert MEASURED.findall(re.sub("`[^`]*`", "", left)) == []


def test_the_card_of_the_bundled_model_quotes_its_training():
    """All but the samples, which a test of GPUs and the card's own command draw again."""
    card = (ROOT / "jllm" / "assets" / "fairytale" / "README.md").read_text(encoding="utf-8")
    figures = train_card.figures(result("train_small"))
    before, after = train_card.TEMPLATE.read_text(encoding="utf-8").split("{samples}")
    assert card.startswith(before.format(length=train_card.LENGTH, **figures))
    assert card.endswith(after.format(length=train_card.LENGTH, **figures))


def test_the_bundled_text_is_as_long_as_its_page_says():
    page = (BUNDLED_TEXT.parent / "README.md").read_text(encoding="utf-8")
    count, size = len(read_documents(BUNDLED_TEXT)), BUNDLED_TEXT.stat().st_size
    tokens = count + only("quant_accuracy", "cpu", scheme="bf16", kv="model")["tokens"]  # each begins with one unscored
    assert f"{count} documents, {tokens:,} tokens, {size / 1e3:.0f} kB" in page


def test_tables_of_accuracy_have_the_speeds_of_today(tmp_path, monkeypatch):
    monkeypatch.setattr(accuracy_report, "draw_all", lambda *_: [])
    for path in sorted(RESULTS.glob("quant_accuracy*.md")):
        accuracy_report.write_report(read_result(path.with_suffix(".json")), tmp_path / f"{path.stem}.json")
        made = (tmp_path / path.name).read_text(encoding="utf-8").rstrip()
        draw = f"python -m experiments.quant_accuracy --draw {path.with_suffix('.json')}"
        assert path.read_text(encoding="utf-8").startswith(made), draw
