"""Kernels against peers, their tests and checkers."""

from experiments.report.answers import times_of_bar
from experiments.report.sections.section import COPY, Section, Table

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
        "Exchanges of M x E in a chain inside one jit, on the host's clock: `us` of 64 with what the host does for "
        "them, `us_longer_chain` of each further one up to 256, which bars are of. `peer` over peer memory, `two-shot` "
        "the same by its way for large ones, `xla` by XLA's collective. `bits`: those of a sum in the order of ranks, "
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
