"""What the pages of details say about each experiment, and which columns of its rows they show, in their order."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from experiments.report.answers import estimated_within, last_values, nothing, of_bars, starts, times_of_bar, verdict
from experiments.steps.floors import ATTENTION_PEAK, HBM, PEAKS

Row = dict[str, Any]


def _every(row: Row) -> bool:
    return True


@dataclass(frozen=True)
class Table:
    """Some rows of a file. Without columns: all keys, a table for each set of them."""

    columns: tuple[str, ...]
    caption: str = ""
    where: Callable[[Row], bool] = _every
    pivot: tuple[str, str] | None = None  # (key, value): a column for each value of key, with that of `value` in it
    hidden: bool = False  # rows that are not worth a table


@dataclass(frozen=True)
class Section:
    """Files whose experiment matches `pattern`; its groups fill the {} of the title. Rows that no table takes follow
    with all of their keys."""

    pattern: str
    title: str
    intro: str = ""
    tables: tuple[Table, ...] = field(default=())
    answer: Callable[[Row], str] = nothing  # in short, from the document


# Figures of peers that are constants of the benchmarks, since their packages were not there when these ran.


def _is(**wanted: Any) -> Callable[[Row], bool]:
    return lambda row: all(row.get(key) == value for key, value in wanted.items())


def _has(*keys: str) -> Callable[[Row], bool]:
    return lambda row: all(key in row for key in keys)


FLOOR = (
    f"every weight and the K and V of every sequence read once at {HBM / 1e12:.2f} TB/s, or a product's arithmetic "
    f"where that takes longer, at {PEAKS[None] / 1e12:.0f} TFLOP/s (in 8 bits {PEAKS['int8'] / 1e12:,.0f} TOP/s), and "
    f"prompts' attention at {ATTENTION_PEAK / 1e12:.0f} TFLOP/s: the best figures measured on an H200"
)
COPY = Table(("gb_s",), "the ceiling of the run: a large copy", _is(kernel="copy"))
CLAIM_TABLES = (Table(("stated", "measured", "verdict"), "the verdict", _has("verdict")),)

STEPS = (
    Section(
        "decode_step(?!-two).*",
        "A whole decode step, by batch",
        "LLaMA-2-7B, one token for each of a batch of sequences. Bars are shares of its floor: "
        f"{FLOOR}.",
        (Table(("model", "batch", "kv", "context", "backend", "decode_ms", "floor_ms", "floor_fraction"), "by batch"),),
        of_bars("{:.0%} to {:.0%} of the floor", ".*share of the floor"),
    ),
    Section(
        "decode_step-two.*",
        "Decode steps of models on two devices",
        "As above, and the floor is that of a device's share, at an H200's limits whatever the device. Of LLaMA-2-70B "
        "20 of the 80 layers.",
        (Table(("model", "devices", "batch", "kv", "context", "decode_ms", "floor_ms", "floor_fraction"), "by batch"),),
    ),
    Section(
        "step_profile.*",
        "Where the time of a step goes, by kernel",
        "Microseconds of one step by the device's profiler, and what no kernel covers.",
        (
            Table(
                ("step", "batch", "context", "input", "kind", "calls", "us", "share"),
                "by kind",
                lambda r: r.get("kernel") == "(all)",
            ),
            Table(
                ("step", "batch", "context", "input", "kernel", "kind", "calls", "us", "share"),
                "kernels",
                lambda r: r.get("kernel") != "(all)",
            ),
        ),
    ),
    Section(
        "throughput.*",
        "Prefill, decode and tokens a second, by batch, input and output",
        "PPL.LLM's table, row for row, with its figures on an H800 beside (`h800_`), and shares of the floor: "
        f"{FLOOR}.",
        (
            Table(
                (
                    "peer", "model", "scheme", "kv", "backend", "batch", "input", "output", "prefill_ms",
                    "h800_prefill_ms", "decode_ms", "h800_decode_ms", "tokens_s", "h800_tokens_s",
                    "memory_gib", "h800_memory_gib",
                    "prefill_floor_fraction", "floor_fraction",
                ),
                "by batch",
            ),
        ),
        of_bars("decode at {:.0%} to {:.0%} of the floor", "^decode"),
    ),
    Section(
        "quant_steps",
        "Whole steps by weight scheme and batch",
        "7B steps through the kernels that serve, each scheme beside bf16.",
    ),
    Section(
        "qps_host.*",
        "Requests a second: what the host does",
        "The QPS workload's schedule on a device that takes no time: ladder slack, and the host's own work.",
        (
            Table(
                ("repeat", "batching", "prefill", "sampling", "host", "seconds", "steps", "slack", "host_us"),
                "by repeat",
            ),
        ),
        last_values("{:.2f} us a running request a step, slack {:.3f}", "host_us", "slack"),
    ),
    Section(
        "qps.*",
        "Requests a second",
        "1,024 conversations sent at once or at a rate, each continued to its given length; mean of the repeats last.",
        (
            Table(
                (
                    "peer", "repeat", "scheme", "kv", "backend", "rate", "batching", "prefill", "sampling", "host",
                    "qps", "qps_ci", "output_tokens_s", "ttft_ms_p50", "ttft_ms_p99", "itl_ms_p50", "itl_ms_p99",
                    "e2e_ms_p50", "goodput", "slack", "preemptions", "floor_s",
                ),
                "by repeat",
            ),
        ),
        last_values("{:.1f} requests a second", "qps"),
    ),
    Section(
        "kv_measured",
        "KV policies served in a pool too small for the workload, and simulated",
        "Requests a second and at once, pages taken and left empty; `sim_` is the simulator's, `sim_error` how far its "
        "requests a second are from those measured.",
        (
            Table(
                (
                    "kv_policy", "predictor", "pool_gib", "kv", "requests", "qps", "sim_qps", "sim_error",
                    "running_mean", "sim_held_mean", "preemptions", "wasted_share", "fragmentation_mean",
                    "ttft_ms_p50", "itl_ms_p99", "slack",
                ),
                "by policy",
            ),
        ),
    ),
    Section("simulate.*", "Serving, simulated", "The engine's scheduler on steps that are costed."),
    Section(
        "simulation_error",
        "How far simulated and estimated figures are from measured ones",
        "`off_by` is the simulated figure over the measured one, less 1.",
        (
            Table(
                (
                    "of", "gpus", "model", "layers", "batch", "context", "level", "load", "figure", "measured",
                    "simulated", "off_by", "file",
                ),
                "by figure",
            ),
        ),
    ),
    Section(
        "clusters_(.*)",
        "Many GPUs serving, simulated: {}",
        "The QPS workload as often as there are GPUs, all at once and at a share (`load`) of what the best mesh "
        "serves; `ranks` GPUs of a mesh share a model. Estimated steps, the engine's own scheduler.",
        (
            Table(
                (
                    "gpus", "ranks", "engines", "slots", "how", "split", "load", "rate", "requests", "qps",
                    "output_tokens_s", "goodput", "ttft_ms_p50", "ttft_ms_p99", "itl_ms_p50", "itl_ms_p99",
                    "itl_ms_max",
                ),
                "simulated",
            ),
        ),
    ),
    Section(
        "disaggregation",
        "Prefill and decode in steps of their own beside merged ones, on one GPU",
        "`level` -1 is an engine as it is; 0 has steps of prompts or of decodes alone.",
    ),
    Section(
        "disaggregation_simulated",
        "Prefill and decode on GPUs of their own, simulated",
        "On as many GPUs as replicas, all at once and at loads.",
    ),
    Section(
        "meshes",
        "Steps of models that several GPUs of a host share, estimated",
        "Of one H200's steps and exchanges measured between two GPUs; more than two were never measured.",
    ),
    Section(
        "other_devices",
        "Decode steps on devices that were not measured, estimated",
        "From data sheets, with the shares of their limits that an H200's steps have.",
    ),
    Section(
        "hardware.*",
        "Devices from their data sheets: the rules of PPL.LLM's slides, and our estimate",
        "LLaMA-2-7B in bf16, 512 tokens a request. `slides_` columns are by PPL.LLM's rules; `same_ms` is our estimate "
        "of their batch, and `requests`, `step_ms` and `tokens_s` are those of the largest batch that fits. "
        "`mtokens_usd`: a million tokens for a dollar of rent. The last two tables hold the estimate against measured "
        "steps. `python -m experiments.hardware --help` has the rules.",
        (
            Table(
                (
                    "device", "memory_gb", "bandwidth_gb_s", "tflops", "usd_hour", "slides_requests", "slides_ms",
                    "slides_tokens_s", "slides_compute_ms", "slides_mtokens_usd", "backend", "same_ms", "requests",
                    "step_ms", "tokens_s", "mtokens_usd", "offer",
                ),
                "by device, the fastest memory first",
                _is(part="table"),
            ),
            Table(("device", "backend", "steps", "least", "most", "largest"), "the largest errors", _is(part="error")),
            Table(
                ("device", "backend", "batch", "context", "measured_ms", "estimated_ms", "off_by", "file"),
                "measured steps, and what would have been estimated",
                _is(part="check"),
            ),
        ),
        estimated_within,
    ),
    Section("kv_choices.*", "KV policy, slots and page size by simulation"),
    Section(
        "speculation-acceptance.*",
        "Drafts: how often they are accepted, and what that gains",
        "The bundled model, one document at a time, in turn without drafts (twice: the second is noise) and with those "
        "of each drafter, always (`fixed`) or where they pay (`automatic`). Intervals are by bootstrap over documents.",
        (
            Table(
                (
                    "workload", "temperature", "drafter", "choice", "documents", "tokens_a_step", "tokens_a_step_95",
                    "tokens_s", "times", "times_95", "cpu_times", "same_tokens",
                ),
                "a document's time without drafts over its time with",
                _has("times"),
            ),
            Table(
                ("workload", "temperature", "drafter", "depth", "documents", "acceptance", "acceptance_95"),
                "share of steps with a draft of this depth that accepted it",
                _has("depth"),
            ),
        ),
        of_bars("{:.2f} times as fast with n-gram drafts on repetitive text", "^ngram"),
    ),
    Section(
        "speculation-claims.*",
        "Drafts: what is claimed of them",
        "`python -m experiments.speculation claims --help` says what the columns mean.",
        (Table(("claim", "stated", "measured", "verdict"), "verdicts", _has("verdict")),),
    ),
    Section(
        "speculation-steps-(.*)",
        "Drafts: what verifying them costs, {}",
        "Random weights and imposed acceptance: simulated, drafting not included. `Q` rows a sequence are its newest "
        "token and its drafts; `over_plain` is the time of such a step over a plain one's, and so the tokens that it "
        "must make to break even.",
        (
            Table(
                (
                    "batch", "context", "Q", "step_ms", "over_plain", "break_even_acceptance", "imposed_tokens_a_step",
                    "tokens_s", "times",
                ),
                "by batch, context and rows",
                _has("step_ms"),
            ),
            Table(
                (
                    "batch", "context", "Q", "published", "tokens_a_step", "times_here", "their_times",
                    "tokens_needed", "source",
                ),
                "what published figures would give, or take, by these steps",
                _has("published"),
            ),
        ),
    ),
    Section("train_length_predictor", "Training of the output length predictor"),
)  # fmt: skip

ATTENTION = ("R", "length", "H", "K", "kv")
KERNELS = (
    Section(
        r"decode_attention(?:\W.*|_.*)?",
        "Decode attention against FlashInfer and cuDNN",
        "One query a sequence over shuffled pages of 16. The bar of a bf16 cell is the time of FlashInfer's fastest "
        "variant, where it ran in the same job; that of a quantized KV format is bf16's time by the ratio of bytes and "
        "a slack; that of skewed lengths, uniform ones'.",
        (
            COPY,
            Table(ATTENTION, "us, as it is chosen by default", lambda r: r.get("default") is True, ("peer", "us")),
            Table(ATTENTION, "us", lambda r: "default" not in r and "peer" in r, ("peer", "us")),
            Table((*ATTENTION, "computing", "tile", "per_sm", "split", "us", "gb_s"), "other configurations"),
        ),
        times_of_bar("FlashInfer's time", r"\(\d+, \d+\) H/K=\S+ bf16$"),
    ),
    Section(
        r"prefill_attention(?:\W.*|_.*)?",
        "Prefill attention against FlashInfer and cuDNN",
        "Causal attention of prompts over pages. Bars are the times of FlashInfer's faster variant, where it ran in "
        "the same job, and for a chunk that continues a sequence a share of cuDNN's rate.",
        (Table(("q_lens", "kv_lens", "H", "K", "P", "kv", "peer", "config", "clock", "run", "us", "tflop_s"), "us"),),
        times_of_bar("FlashInfer's time", "causal"),
    ),
    Section(
        "cache_update",
        "Rotary and cache write in one kernel",
        "`fused` reads the QKV projection where it is, `sliced` gets slices of it, `xla` is the plain backend.",
        (COPY, Table(("T", "H", "K", "kv"), "us", pivot=("peer", "us"))),
    ),
    Section(
        "move_tokens",
        "Accepted drafts to their places, in all layers at once",
        "Of the trees of R sequences up to Q nodes each were accepted (`moves`), or none (`idle`).",
        (COPY, Table(("R", "Q", "L", "K", "kv", "step"), "us", pivot=("peer", "us"))),
    ),
    Section(
        "all_reduce.*",
        "Sums over the GPUs of one host",
        "Exchanges of M x E in a chain inside one jit, on the host's clock: `peer` over peer memory, `two-shot` the "
        "same by its way for large ones, `xla` by XLA's collective. `bits`: those of a sum in the order of ranks, "
        "rounded once.",
        (Table(("ranks", "M", "E", "dtype", "backend", "us", "us_longer_chain", "bits", "replays", "replayed_bits")),),
    ),
    Section(
        "int8_matmul.*|fp8_matmul.*",
        "8-bit products against XLA and torch",
        "Scales included, weights rotated so that no cache holds them. Bars: XLA's own int8 path in the run, torch's "
        "fp8 product with 10 % where it ran in the same job, TOP/s at many rows, bandwidth at few.",
        (COPY, Table(("M", "K", "N"), "us", pivot=("peer", "us"))),
        times_of_bar("torch's fp8 time and 10 %", "torch"),
    ),
    Section(
        "weight_only_matmul.*",
        "Products with 4-bit weights against bf16",
        "Bars are speed over XLA's bf16 product of the same shape.",
        (COPY,),
    ),
    Section(
        "matmul.*",
        "16-bit products of few rows against XLA",
        tables=(COPY, Table(("M", "K", "N"), "us", pivot=("peer", "us"))),
    ),
    Section(
        "gemm_skinny",
        "Products of few rows: the sweep while the kernel was built",
        tables=(Table(("M", "K", "N", "dtype", "rows", "columns", "split", "step", "us", "gb_s"), "configurations"),),
    ),
    Section(
        "norm_quant",
        "Norm and quantization in one kernel against XLA",
        tables=(COPY, Table(("T", "E", "kind", "residual"), "us", pivot=("peer", "us"))),
    ),
    Section(
        "silu_mul_quant",
        "SiLU, product and quantization in one kernel against XLA",
        tables=(COPY, Table(("T", "F", "kind"), "us", pivot=("peer", "us"))),
    ),
    Section(
        "swiglu.*",
        "Gate and up projection with SiLU in one kernel against a product and a pass",
        "`default` is the product and the pass that the model takes otherwise; `mosaic RxCxS` are other tiles.",
        tables=(COPY, Table(("M", "K", "F"), "us", pivot=("peer", "us"))),
    ),
    Section(
        "sample",
        "Sampling in one kernel against plain jnp and sorting",
        "Microseconds of kernels, and on the host's clock (`wall_us`), which has plain jnp's waits for the host.",
        tables=(
            Table(("R", "V", "asked"), "us", pivot=("peer", "us")),
            Table(("R", "V", "asked"), "wall_us", pivot=("peer", "wall_us")),
        ),
    ),
    Section(
        "tests",
        "Tests on a device",
        "What `pytest -m gpu` counted, by file; a test that failed is named in the file.",
        answer=lambda document: f"{document['passed']} passed, {document['failed'] + document['error']} failed",
    ),
    Section(
        "sanitizer.*",
        "Memory checkers over the kernels",
        "compute-sanitizer's tools over each kernel; `wrong` is the error against the reference, relative to its norm.",
        answer=lambda document: f"{sum(row.get('errors', 0) for row in document['rows'])} errors",
    ),
)  # fmt: skip

ACCURACY = (
    Section(
        "quant_accuracy.*",
        "What quantized weights and KV formats cost in accuracy",
        "Perplexity by a named protocol, divergence from the unquantized model in nats a token, agreement of the most "
        "likely tokens, with 95 % intervals (bootstrap); bytes of a weight and of a value of K or V.",
        (
            Table(
                (
                    "part", "scheme", "kv", "protocol", "tokens", "perplexity", "added", "added_95", "kl", "kl_95",
                    "top1", "bytes_per_weight", "bytes_per_kv",
                ),
                "by scheme and KV format",
                _has("scheme", "perplexity"),
            ),
        ),
    ),
    Section(
        "ptq_methods.*",
        "What calibration gains over plain rounding at equal bits",
        "Divergence from the unquantized model in nats a token, and over that of rounding (`ratio`), with 95 % "
        "intervals (bootstrap over documents or windows); of the model as it is, and with planted outliers.",
        (
            Table(
                (
                    "model", "scheme", "method", "seed", "protocol", "kl", "kl_95", "ratio", "ratio_95", "added",
                    "seconds",
                ),
                "by method",
            ),
        ),
        of_bars("{:.2g} to {:.2g} of rounding's divergence at most, where a method should be better"),
    ),
    Section(
        "mixed_precision",
        "Mixed precision: the format of each layer by its sensitivity, under a budget of bytes",
        "Divergence from the unquantized model in nats a token, and over that of the best uniform format that fits "
        "(`ratio`), with 95 % intervals by bootstrap over documents. Shuffled: the same formats in other layers.",
        (
            Table(("formats", "bytes_per_weight", "kl", "kl_95"), "all layers alike", _is(part="uniform")),
            Table(
                ("part", "budget", "seed", "formats", "bytes_per_weight", "kl", "kl_95", "over", "ratio", "ratio_95"),
                "by layer",
            ),
        ),
        of_bars("{:.2g} to {:.2g} of the divergence left"),
    ),
    Section(
        "long_context",
        "Long contexts by position: needles, perplexity, and a cache that forgets",
        "Needles: the share of questions that a small model trained for it answers, with 95 % intervals by Wilson, by "
        "depth of what is asked for. Outliers: the same beside outliers planted into two channels of each head's K and "
        "V. Position: nats a token of the bundled model, whose context is 1,024, with 95 % intervals by bootstrap over "
        "windows. `policy`: all tokens are kept, or the first and the last ones.",
        (
            Table(
                ("tokens", "kv", "policy", "kept", "depth", "accuracy", "accuracy_95", "nats"),
                "needles",
                _is(part="needle"),
            ),
            Table(("strength", "kv", "accuracy", "accuracy_95", "nats"), "outliers", _is(part="outlier")),
            Table(("kv", "policy", "upto", "nats", "nats_95"), "position", _is(part="position")),
        ),
    ),
    Section("train_needle", "Training of the model that finds needles"),
    Section(
        "continuations",
        "What quantization does to texts that are generated, and serving beside the forward pass",
        "Greedy continuations against those of the unquantized model: after how many tokens they become others "
        "(`agreed`, 95 % intervals by bootstrap over prompts), the share that is the same after N tokens (`same_N`), "
        "and what teacher forcing would make of it (`expected_N`). `gap`: log-probabilities as served and by the "
        "forward pass without a cache, in nats.",
        (
            Table(
                (
                    "scheme", "forced_kl", "forced_top1", "agreed", "agreed_95", "same_8", "expected_8", "same_32",
                    "expected_32", "same_64", "expected_64", "activations", "gap", "gap_mean",
                ),
                "schemes",
                _is(kv="model"),
            ),
            Table(("kv", "agreed", "agreed_95", "same_8", "same_32", "same_64"), "KV formats", _is(scheme="bf16")),
        ),
    ),
    Section(
        "outliers",
        "What outliers of activations do to quantization, and what SmoothQuant mends",
        "Divergence from the unquantized model in nats a token, by how much larger planted outlier channels are than "
        "others; `massive` is the first token's massive activation alone.",
        (
            Table(("strength", "scale", "smooth", "kl", "kl_95"), "int8 weights and activations", _is(part="strength")),
            Table(("strength", "group", "kl", "kl_95"), "int4 weights alone, rounded", _is(part="group")),
            Table((), "largest activations", _is(part="channel"), hidden=True),
        ),
    ),
    Section(
        "rotations.*",
        "What rotations and scales of channels gain beside outliers of K and V, and of what linear layers read",
        "Divergence from the unquantized model in nats a token, by how much larger planted outlier channels are than "
        "others, or by how many channels most of the residual stream lies in; a seed draws the channels. `alpha`: "
        "SmoothAttention's, 0 is without.",
        (
            Table(("strength", "kv", "seed", "kl", "kl_95"), "K and V in 4 bits", _is(part="kv")),
            Table(("strength", "scheme", "method", "seed"), "weights", _is(part="weights"), pivot=("rotate", "kl")),
            Table(("channels", "scheme", "seed"), "the stream", _is(part="stream"), pivot=("rotate", "kl")),
            Table(("strength", "kv", "seed"), "channels scaled ahead", _is(part="smooth"), pivot=("alpha", "kl")),
            Table(("strength", "kv", "seed", "kl", "kl_95"), "K per channel and per token", _is(part="channel")),
        ),
        of_bars("{:.2g} to {:.2g} of the divergence left"),
    ),
    Section(
        "train_small", "Training of the bundled model", answer=last_values("validation loss {:.3f}", "valid_loss")
    ),
    Section("train_drafters.*", "Training of drafters", "How often drafts are what the target draws, by depth."),
)  # fmt: skip

LIBRARY = (
    Section("first_command", "The first command, from start to the last of 64 tokens"),
    Section(
        "start_up",
        "An engine's start, from its weights to the first token",
        "Cold, and warm: with the compiled steps that the cold start left in files. Each in a process of its own.",
        (
            Table(
                (
                    "model", "scheme", "slots", "start", "processes", "sizes", "loaded", "start_s", "engine_s",
                    "ahead_s", "first_token_s",
                ),
                "by start",
            ),
        ),
        starts,
    ),
    Section(
        "step_tracing",
        "How long tracing and lowering a step hold Python's lock",
        "Processor time on the machine of the run, without a GPU; taken_in_s: where another process traces the step.",
    ),
    Section("load_memory", "Memory while a checkpoint loads"),
)  # fmt: skip

CLAIMS = (Section(r"claims-(C\d+)(?:-.*)?", "Claim {}", tables=CLAIM_TABLES, answer=verdict),)
PAGES = {  # file in results/ -> title and sections; the last takes what no section describes
    "kernels": ("Kernels", KERNELS),
    "accuracy": ("Accuracy", ACCURACY),
    "claims": ("Claims of the original system", CLAIMS),
    "steps": ("Whole steps, requests and the library itself", (*STEPS, *LIBRARY, Section(".*", ""))),
}
