"""Whole steps, and requests a second."""

from experiments.report.answers import last_values, of_bars
from experiments.report.sections.section import FLOOR, Section, Table

STEPS = (
    Section(
        "decode_step(?!-two|-four).*",
        "A whole decode step, by batch",
        "LLaMA-2-7B, one token for each of a batch of sequences. Bars are shares of its floor: "
        f"{FLOOR}.",
        (Table(("model", "batch", "kv", "context", "backend", "decode_ms", "floor_ms", "floor_fraction"), "by batch"),),
        of_bars("{:.0%} to {:.0%} of the floor", ".*share of the floor"),
    ),
    Section(
        "decode_step-(two|four).*",
        "Decode steps of models on several devices",
        "As above, and the limits of all devices count together.",
        (
            Table(
                ("model", "scheme", "devices", "batch", "kv", "context", "decode_ms", "floor_ms", "floor_fraction"),
                "by batch",
            ),
        ),
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
                    "prefill_ms_median", "prefill_ms_most", "h800_prefill_ms", "decode_ms", "decode_ms_median",
                    "decode_ms_most", "h800_decode_ms", "tokens_s", "h800_tokens_s",
                    "memory_gib", "h800_memory_gib",
                    "prefill_floor_fraction", "floor_fraction",
                ),
                "by batch",
            ),
        ),
        of_bars("decode at {:.0%} to {:.0%} of the floor", "^decode"),
    ),
    Section(
        "quant_steps.*",
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
                    "peer", "devices", "replicas", "repeat", "scheme", "kv", "backend", "rate", "batching", "prefill",
                    "sampling", "host", "qps", "qps_ci", "output_tokens_s", "ttft_ms_p50", "ttft_ms_p99", "itl_ms_p50",
                    "itl_ms_p99", "e2e_ms_p50", "goodput", "slack", "preemptions", "floor_s",
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
)  # fmt: skip
