"""What quantization costs in accuracy, what methods leave of it, and trainings."""

from collections.abc import Callable
from itertools import product
from statistics import mean
from typing import Any

from experiments.serving.workload import half_interval
from tests.quotes.files import H100, only, result, rows, spread


def accuracy(name: str, scheme: str, kv: str = "model") -> float:
    return only("quant_accuracy", "cpu", scheme=scheme, kv=kv, part="scheme")[name]


def unharmed(scheme: str, kv: str) -> tuple[str]:
    low, high = accuracy("added_95", scheme, kv)  # type: ignore[misc]
    return ("nothing measurable" if low < 0 < high else "something",)


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
    """Of the larger subject and of a model that is trained as the bundled one was, on the same held-out book."""
    subject = result("train_small", H100)
    losses = [subject["valid_loss"], subject["valid_bits_per_byte"], result("train_small")["valid_bits_per_byte"]]
    assert subject["valid_bytes"] == result("train_small")["valid_bytes"]
    return losses


def with_fewer_heads(count: int) -> list[float]:
    """Nats a token that models with so many KV heads are better by, the mean of seeds, and its 95 % interval."""
    better = [-row["added"] for row in rows("claims-C29", "cpu", kv_heads=count)]
    half = half_interval(better)
    assert half is not None
    assert len(better) == 8
    return [mean(better), mean(better) - half, mean(better) + half]


def of_the_subject(model: str, *methods: str) -> list[float]:
    """Of rounding's divergence, the mean of seeds."""
    found = rows(f"ptq_methods_subject_{model}", "cpu")
    return [mean(row["ratio"] for row in found if row["method"] == method) for method in methods]


def left_of_the_stream(scheme: str) -> float:
    """By rotating the larger subject with outliers in its residual stream, the mean of seeds."""
    none, turned = (
        mean(row["kl"] for row in rows("rotations-subject-stream", "cpu", channels=4, scheme=scheme, rotate=rotate))
        for rotate in ("none", "all")
    )
    return turned / none


def left_by_layer(budget: float) -> tuple[float, float]:
    """Of the best uniform format's divergence, by choosing the larger subject's formats by sensitivity."""
    found = rows("mixed_precision-subject", "cpu", part="mixed", budget=budget)
    return spread([row["ratio"] for row in found])


def left_of_the_subject() -> float:
    """By rotating 4-bit K and V of the larger subject: the most of all formats and seeds."""
    kl = {(row["kv"], row["seed"]): row["kl"] for row in rows("rotations-subject", "cpu", strength=32)}
    return max(value / kl[name.removesuffix("-h"), seed] for (name, seed), value in kl.items() if name.endswith("-h"))


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


def left_by_rotations(*which: str, experiment: str = "rotations-learned") -> list[float]:
    found = rows(experiment, "cpu", part="learned", scheme="mxfp4")
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
    "{:.4f} nats a token for `w8a8`, {:.3f} for `fp8`, {:.3f} for `nf4`, {:.3f} for `w4a16-g128`": lambda: [
        accuracy("kl", scheme) for scheme in ("w8a8-talk", "fp8", "nf4", "w4a16-g128")
    ],
    "with O {:.5f} nats a token (`w8a8-all`), and with the head, whose roundings no layer averages, {:.5f} (": (
        with_the_head
    ),
    "never saw with {:.2f} nats a token of its own vocabulary: {:.3f} bits a byte, for {:.3f} of a model that is "
    "trained": trainings,
    "With outliers 32 times as large as others planted into its K and V, rotated formats of 4 bits leave at most "
    "{:.3f} of the divergence": lambda: [left_of_the_subject()],
    "rounding's divergence with 4-bit weights GPTQ leaves {:.2f} there and AWQ {:.2f} (": lambda: (
        of_the_subject("plain", "gptq", "awq")
    ),
    "AWQ leaves {:.2f} of it, GPTQ {:.2f} and learned scales {:.2f}, and SmoothQuant {:.3f} of W8A8's": lambda: (
        of_the_subject("planted", "awq", "gptq", "learned", "smoothquant")
    ),
    "With outliers in the residual stream a rotation leaves {:.2f} with 4-bit integers": lambda: [
        left_of_the_stream("w4a16-g64")
    ],
    "and MR-GPTQ {:.2f} in `mxfp4`, while in `nvfp4` GPTQ alone is better, {:.2f} for {:.2f}": lambda: [
        beside_rounding("ptq_methods_subject_fp4_stream", "mr-gptq")[0],
        *(beside_rounding("ptq_methods_subject_fp4_stream", method)[1] for method in ("gptq", "mr-gptq")),
    ],
    "Formats chosen layer by layer leave {:.2f} to {:.2f} of the divergence of `w4a16-g32-zp`": lambda: (
        left_by_layer(0.594)
    ),
    "two KV heads of eight are better by {:.3f} nats a token than those with eight (95 % of eight seeds: {:.3f} to "
    "{:.3f}), and those with one by {:.3f} ({:.3f} to {:.3f}).": lambda: with_fewer_heads(2) + with_fewer_heads(1),
    "divergence falls to {:.2f} (GPTQ) and {:.2f} (AWQ) of rounding's": lambda: [
        ratio(method, "plain") for method in ("gptq", "awq")
    ],
    "there AWQ leaves {:.2f} and SmoothQuant {:.3f} of rounding's divergence": lambda: [
        ratio(method, "planted") for method in ("awq", "smoothquant")
    ],
    "while without outliers SmoothQuant adds {:.1f} % to it": lambda: [100 * (ratio("smoothquant", "plain") - 1)],
    "W8A8 of every linear adds {:.2f} % to perplexity": lambda: [100 * accuracy("added", "w8a8-all")],
    "an int8-g8 cache {};": lambda: unharmed("bf16", "int8-g8"),
    "with blocks of 32 has at most {:.4f} of the divergence": lambda: [
        next(bar["value"] for bar in result("rotations-channel", "cpu")["bars"] if "2 bits" in bar["name"])
    ],
    "with scales for groups of what O and down read {:.5f} (": lambda: [
        only("quant_accuracy-groups", "cpu", part="scheme", scheme="w8a8-groups")["kl"]
    ],
    "On the bundled model `kivi2-g32` adds {:.1f} % to perplexity and `kivi2-g32-r32` {:.1f} % at 0.375 bytes a value "
    "(tails apart); `int4-g32` {:.1f} % at 0.56, and 2 bits per token (`int2-g32-zp`) {:.0f} %": per_channel,
    "with outliers in the residual stream it leaves {:.2f} of rounding's divergence in `mxfp4` and {:.2f} in `nvfp4`, "
    "rotated blocks alone {:.2f} and {:.2f}": lambda: [
        *beside_rounding("ptq_methods_fp4_stream", "mr-gptq"), *beside_rounding("ptq_methods_fp4_stream", "h")
    ],
    "With 16,384 it leaves {:.2f} and {:.2f} there": lambda: beside_rounding(
        "ptq_methods_subject_fp4_rows128", "mr-gptq"
    ),
    "K loses more by it: of the bundled model {:.3f} nats a token in `int2-g32-zp`, V {:.3f} (": lambda: [
        only("rotations-channel", "cpu", part="channel", strength=1.0, kv=kv)["kl"]
        for kv in ("k=int2-g32-zp,v=model", "k=model,v=int2-g32-zp")
    ],
    "rotated blocks lose to blocks as they are, {:.1f} and {:.1f} to one": lambda: (
        beside_rounding("ptq_methods_fp4", "h")
    ),
    "of the [larger subject](accuracy.md#a-larger-subject) {:.2f} and {:.2f}, rotated blocks {:.2f} and {:.2f}, and "
    "GPTQ of blocks as they are {:.2f} and {:.2f}, so that this is the best there in `nvfp4`": lambda: [
        left
        for method in ("mr-gptq", "h", "gptq")
        for left in beside_rounding("ptq_methods_subject_fp4_stream", method)
    ],
    "it leaves {:.2f} of the divergence of `mxfp4`, and Hadamard rotations {:.2f}, of the larger subject {:.2f} and "
    "{:.2f} (": lambda: [
        *left_by_rotations("learned", "all"),
        *left_by_rotations("learned", "all", experiment="rotations-subject-learned"),
    ],
}  # fmt: skip
