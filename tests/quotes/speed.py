"""What was timed: steps, requests, kernels, exchanges and starts."""

from collections.abc import Callable
from functools import partial
from statistics import mean
from typing import Any

from experiments.serving.workload import half_interval
from tests.quotes.files import H100, only, rows, spread

BF16, W8A8 = "llama-2-7b_bf16_kv-bf16", "llama-2-7b_w8a8_kv-int8-g8"


def times_as_fast(scheme: str, kind: str, least: int = 0) -> dict[int, float]:
    """Tokens of a step -> times as fast as bf16, with a 16-bit cache."""
    steps = [row for row in rows("quant_steps", H100, scheme=scheme, kv="bf16") if f"{kind}_ms" in row]
    return {row["T"]: row["over_bf16"] for row in steps if row["T"] >= least}


def times_a_token() -> tuple[float, float]:
    """How many times as long decode steps take with scales for groups of what O and down read."""
    steps = [row for row in rows("quant_steps-groups", H100) if "decode_ms" in row]
    ms = {(row["scheme"], row["kv"], row["batch"]): row["decode_ms"] for row in steps}
    return spread([took / ms["w8a8-all", kv, b] for (scheme, kv, b), took in ms.items() if scheme == "w8a8-groups"])


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


def served_here(scheme: str) -> dict[str, Any]:
    """What this library served on an H100: the mean of several runs, or the one."""
    return [row for row in rows(f"qps_llama-2-7b_{scheme}", H100) if "peer" not in row][-1]


def beside_vllms(scheme: str) -> list[float]:
    """Requests a second, and the mean of vLLM's in the same job."""
    theirs = rows(f"qps_llama-2-7b_{scheme}", H100, peer="vLLM")
    return [served_here(scheme)["qps"], mean([row["qps"] for row in theirs])]


def intervals(scheme: str) -> list[float]:
    """Half of the 95 % interval of both."""
    theirs = rows(f"qps_llama-2-7b_{scheme}", H100, peer="vLLM")
    return [served_here(scheme)["qps_ci"], half_interval([row["qps"] for row in theirs])]


def exchanges(backend: str, experiment: str = "all_reduce", most: int = 4096) -> list[float]:
    """Microseconds between GPUs, of what a chain has, by rows up to the most; without a label between two."""
    sizes = [m for m in (1, 16, 64, 512, 4096) if m <= most]
    return [only(experiment, H100, backend=backend, M=m)["us_longer_chain"] for m in sizes]


def on_several(label: str, devices: int, device: str = H100) -> list[float]:
    """Milliseconds of decode steps by batch."""
    found = sorted(rows(f"decode_step-{label}", device, devices=devices), key=lambda row: row["batch"])
    return [row["decode_ms"] for row in found]


def times_one(label: str, devices: int = 2) -> tuple[float, float]:
    return spread([one / several for one, several in zip(on_several(label, 1), on_several(label, devices))])


def by_replicas() -> list[float]:
    """Requests a second of two engines and of one, and how many times as many that is."""
    one, two = (only("qps_llama-2-7b_bfloat16_replicas1-2", H100, replicas=n, repeat="mean")["qps"] for n in (1, 2))
    return [two, two / one, one]


def by_four_replicas() -> list[float]:
    """Requests a second of four engines, how many times as many that is as of one, that one's, and milliseconds that a
    step takes an engine of the four, and the one."""
    found = (only("qps_llama-2-7b_bfloat16_replicas1-4", "h200", replicas=n, repeat="mean") for n in (1, 4))
    (one, step), (four, of_four) = (
        (row["qps"], 1e3 * row["replicas"] * row["seconds"] / row["steps"]) for row in found
    )
    return [four, four / one, one, of_four, step]


def apart() -> list[float]:
    """Apart over replicas: throughput of all at once, then at the loads that both serve the least and the most of the
    99th percentiles between tokens and of first tokens."""
    at_once, *found = rows("disaggregation-16-layers", H100, part="claim")
    assert at_once["load"] is None
    ratios = [[row[f"{name}_over_merged"] for row in found] for name in ("itl_ms_p99", "ttft_ms_p99")]
    return [at_once["output_tokens_s_over_merged"], *spread(ratios[0]), *spread(ratios[1])]


def beside_torch(*batches: int) -> list[float]:
    """Milliseconds of steps of ours, each with that of PyTorch's in the same run."""
    found = rows(f"throughput_{BF16}-torch", H100, input=8)
    ours = {row["batch"]: row["decode_ms"] for row in found if "peer" not in row}
    theirs = {row["batch"]: row["decode_ms"] for row in found if "peer" in row}
    return [ms for batch in batches for ms in (ours[batch], theirs[batch])]


def attention(device: str) -> list[float]:
    """Of decode attention from 65,536 keys on, over cuDNN's rate and FlashAttention-2's."""
    found = [row for row in rows("claims-C5", device, H=32) if row["R"] * row["length"] >= 65_536]
    return [*spread([row["over_cudnn"] for row in found]), *spread([row["over_flash"] for row in found])]


def over_flashinfer(kernel: str, *case: str) -> list[float]:
    """Times of FlashInfer's fastest variant in the same job that ours takes in bf16, case by case."""
    ours: dict[tuple[str, ...], float] = {}
    theirs: dict[tuple[str, ...], float] = {}
    for row in rows(kernel, H100, kv="bf16"):
        of = {"mosaic": ours, "FlashInfer": theirs}.get(row["peer"], {})
        key = tuple(str(row[name]) for name in case)
        of[key] = min(of.get(key, row["us"]), row["us"])
    return [ours[key] / theirs[key] for key in ours.keys() & theirs.keys()]


def starts(device: str) -> tuple[float, ...]:
    """The cold start, and the fastest and the slowest warm one."""
    seconds = {kind: [row["start_s"] for row in rows("start_up", device, start=kind)] for kind in ("cold", "warm")}
    return max(seconds["cold"]), *spread(seconds["warm"])


def tracing(seconds: Callable[[dict[str, Any]], float]) -> tuple[float, float]:
    """Of the least and the most that one step takes."""
    return spread([seconds(row) for row in rows("step_tracing", "cpu")])


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
    found = rows("decode_attention-triton-tuned", H100, kernel="decode_attention")
    us = {(row["peer"], row["kv"]): row["us"] for row in found}
    chosen = "triton split=512 warps=2 stages=5"
    return spread([us[chosen, kv] / took for (peer, kv), took in us.items() if peer == "mosaic"])


def steps_over(*formats: str) -> list[float]:
    found = [only(f"decode_step-{kv}", batch=64) for kv in formats]
    return [row["decode_ms"] for row in found]


def over_64_rows(*formats: str) -> list[float]:
    """Microseconds of decode attention."""
    cell = {"kernel": "decode_attention", "R": 64}
    return [only("decode_attention-zp", H100, **cell, kv=kv)["us"] for kv in formats]


QUOTES: dict[str, Callable[[], Any]] = {
    "`w8a8` prefills {:.2f} to {:.2f} times as fast as bf16 from 512 tokens a step on": lambda: (
        spread(times_as_fast("w8a8-talk", "prefill", 512).values())
    ),
    "and decodes {:.2f} to {:.2f} times as fast over a 16-bit cache": lambda: (
        spread(times_as_fast("w8a8-talk", "decode").values())
    ),
    "`w4a16-g128` {:.2f} times at batch 1 and {:.2f} times at 256": lambda: [
        times_as_fast("w4a16-g128", "decode")[batch] for batch in (1, 256)
    ],
    "A decode step of LLaMA-2-7B takes {:.2f} to {:.2f} times as long as with a scale a token": times_a_token,
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
    "steps in bf16 take {:.2f}, {:.2f} and {:.1f} ms at batch 1, 64 and 512": lambda: (
        decoded(BF16, 1, 64, 512, device="h200")
    ),
    **{
        f"| {n} | {{:.2f}} | {{:.0f}} % | {{:.2f}} | {{:.2f}} | {{:.0f}} % | {{:.2f}} |": partial(beside_vllm, n)
        for n in (1, 16, 64, 256)
    },
    "are served at {:.1f} requests a second, for {:.1f} by vLLM (means of two runs, with 95 % intervals of ± {:.1f} "
    "and {:.1f}, which overlap), with int8-g8 K and V "
    "at {:.1f}, and in `w8a8` with these at {:.1f}, for {:.1f} by vLLM in fp8 (± {:.1f} and {:.1f})": lambda: [
        *beside_vllms("bfloat16"),
        *intervals("bfloat16"),
        served_here("bfloat16_kv-int8-g8")["qps"],
        *beside_vllms("w8a8_kv-int8-g8"),
        *intervals("w8a8_kv-int8-g8"),
    ],
    "are served at {:.1f} a second on an H100, where {:.0f} of them run at once on average": lambda: [
        served_here("bfloat16")[name] for name in ("qps", "running_mean")
    ],
    "over an int8-g8 cache at {:.1f}, where {:.0f} do, and": lambda: [
        served_here("bfloat16_kv-int8-g8")[name] for name in ("qps", "running_mean")
    ],
    "with W8A8 too at {:.1f} (": lambda: [served_here("w8a8_kv-int8-g8")["qps"]],
    "on an H200 they are at {:.1f} and {:.1f}, means of two runs.": lambda: [
        only(f"qps_llama-2-7b_{scheme}", repeat="mean")["qps"] for scheme in ("bfloat16", "w8a8_kv-int8-g8")
    ],
    "by the clock for at most {:.1f} % of a step at batch 1": lambda: [
        100 * max(row["share"] for row in rows("step_profile_serve", H100, kind="gap by the clock"))
    ],
    "where kernels take {:.1f} ms, it did for {:.1f} % of a step with nothing else": lambda: [
        sum(row["us"] for row in rows("step_profile_serve-w8a8", H100, kernel="(all)")) / 1e3,
        100 * only("step_profile_serve-w8a8", H100, kind="gap by the clock")["share"],
    ],
    "a step takes {:.2f} ms for {:.2f} at batch 1, {:.2f} for {:.2f} at 128 and {:.2f} for {:.2f} at 256": partial(
        beside_torch, 1, 128, 256
    ),
    "takes {:.2f} to {:.2f} times as long as FlashInfer's fastest variant": lambda: spread(
        over_flashinfer("decode_attention", "R", "length", "K")
    ),
    "attention of prompts {:.2f} (one of 2,048 tokens) to {:.2f} times (eight of 1,024)": lambda: spread(
        over_flashinfer("prefill_attention", "q_lens", "kv_lens", "K")
    ),
    "From 65,536 keys on decode attention reads at {:.2f} to {:.2f} of the rate of cuDNN's on contiguous keys, and is "
    "{:.2f} to {:.2f} times as fast as": lambda: attention(H100),
    "16 CPU cores: {:.1f} s cold and {:.1f} to {:.1f} s warm for seventeen sizes": lambda: starts(H100),
    "took {:.1f} s without them, {:.1f} s with eight and {:.1f} s with fifteen": lambda: [
        only("start_up-processes", H100, start="cold", processes=n)["start_s"] for n in (0, 8, 15)
    ],
    "for Hopper hold its lock for {:.1f} to {:.1f} s, so": lambda: tracing(lambda row: row["trace_s"] + row["lower_s"]),
    "and a step holds the lock for {:.2f} to {:.2f} s": lambda: tracing(lambda row: row["taken_in_s"]),
    "on two CPU cores: {:.1f} and {:.1f} to {:.1f} s for twelve": lambda: starts("cpu"),
    "takes {:.2f}, {:.2f} and {:.2f} times that of Mosaic's kernels at batch 16, 64 and 128": beside_mosaic,
    "at batch 64 over `int8-g8-zp` K and V takes {:.1f} ms with Triton's and {:.1f} with XLA's": lambda: [
        only("decode_step-triton-zp", backend=backend)["decode_ms"] for backend in ("triton", "xla")
    ],
    "The QPS workload is served at {:.2f} times the rate of Mosaic's kernels": lambda: [
        only("qps_llama-2-7b_bfloat16-triton", H100, backend="triton", repeat="mean")["qps"]
        / only("qps_llama-2-7b_bfloat16-triton", H100, backend="default", repeat="mean")["qps"]
    ],
    "in bf16 {:.1f} % slower at batch 1, and {:.1f} % at most from 16 to 256": cost_of_one_order,
    "in bf16 takes {:.2f} to {:.2f} times as long (": attention_beside_mosaic,
    "and 32 KV heads {:.2f} to {:.2f} times (": codes_beside_mosaic,
    "attention over `int4-g128` takes {:.0f} us a layer, over `int4-g128-zp` {:.0f}, over `int4-g32` {:.0f} and over "
    "`int4-g32-h` {:.0f} (": lambda: over_64_rows("int4-g128", "int4-g128-zp", "int4-g32", "int4-g32-h"),
    "at batch 64 and a context of 256 tokens {:.2f} ms over `int4-g32` and {:.2f} over `int4-g32-h`": lambda: (
        steps_over("int4-g32", "int4-g32-h")
    ),
    "XLA's exchange of up to 64 rows takes {:.1f} to {:.1f} times as long": lambda: spread(
        [xla / peer for xla, peer in zip(exchanges("xla")[:3], exchanges("peer"))]
    ),
    "| `peer` | {:.1f} | {:.1f} | {:.1f} | {:.1f} | {:.0f} |": lambda: exchanges("peer"),
    "| XLA | {:.1f} | {:.1f} | {:.1f} | {:.1f} | {:.0f} |": lambda: exchanges("xla"),
    **{
        f"| {name} | {{:.2f}} | {{:.2f}} | {{:.2f}} | {{:.1f}} |": partial(on_several, label, devices)
        for name, label, devices in (
            ("LLaMA-2-7B, one", "two", 1),
            ("LLaMA-2-7B, two", "two", 2),
            ("LLaMA-2-7B, four", "four", 4),
            ("LLaMA-3-8B, one", "two-8b", 1),
            ("LLaMA-3-8B, two", "two-8b", 2),
        )
    },
    "| LLaMA-2-70B `w8a8`, two | {:.1f} | {:.1f} | | |": lambda: on_several("two-70b-w8a8", 2),
    "| LLaMA-2-70B `w4a16-g128`, two | {:.1f} | {:.1f} | | |": lambda: on_several("two-70b-w4a16", 2),
    "| LLaMA-2-70B bf16, four | {:.1f} | {:.1f} | {:.1f} | |": lambda: on_several("four-70b", 4),
    "Two are {:.2f} to {:.2f} times as fast as one with the 7B and {:.2f} to {:.2f} with the 8B": lambda: [
        *times_one("two"), *times_one("two-8b"),
    ],
    "four are {:.2f} to {:.2f} times as fast as one with the 7B": lambda: times_one("four", 4),
    "a step in bf16 takes {:.1f} ms on them at batch 1 and {:.1f} at 16, and LLaMA-2-7B's {:.2f} ms at batch 1 and "
    "{:.2f} at 64": lambda: on_several("two-70b", 2, "h200") + on_several("two", 2, "h200")[:3:2],  # of 1, 16, 64, 512
    "on two H200 they take {:.1f} and {:.2f}": lambda: [
        on_several(label, 2, "h200")[0] for label in ("two-70b", "two")
    ],
    "adds {:.1f} us with 1 row, {:.1f} with 16, {:.1f} with 64 and {:.1f} with 512, XLA's {:.1f}, {:.1f}, {:.1f} and "
    "{:.1f}": lambda: [us for backend in ("peer", "xla") for us in exchanges(backend, "all_reduce-four", 512)],
    "tensor parallelism (LLaMA-2-70B in bf16 on four H100s: {:.1f} ms a step at batch 1)": lambda: (
        on_several("four-70b", 4)[:1]
    ),
    "Four on H200s serve {:.1f}, only {:.2f} times one's {:.1f} (`python -m experiments.qps --replicas 1 4 --repeats "
    "1`): a step takes each engine {:.1f} ms there for {:.1f} alone": by_four_replicas,
    "an engine on each (two serve {:.2f} times one's requests)": lambda: by_replicas()[1:2],
    "Two engines with LLaMA-2-7B on two H100s serve {:.1f} requests a second, {:.2f} times the {:.1f} of one": (
        by_replicas
    ),
    "apart made {:.2f} times the tokens a second of replicas; at the loads the 99th percentile between tokens was "
    "{:.2f} to {:.2f} times theirs, of first tokens {:.1f} to {:.1f} times": apart,
}  # fmt: skip
