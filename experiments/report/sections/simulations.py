"""What is simulated, estimated, or read from data sheets."""

from experiments.report.answers import estimated_within
from experiments.report.sections.section import Section, Table, of

SIMULATIONS = (
    Section("simulate.*", "Serving, simulated", "The engine's scheduler on steps that are costed."),
    Section(
        "simulation_error",
        "How far simulated and estimated figures are from measured ones",
        "`off_by` is the simulated figure over the measured one, less 1.",
        (
            Table(
                (
                    "of", "gpus", "model", "scheme", "layers", "batch", "context", "level", "load", "figure",
                    "measured", "simulated", "off_by", "file",
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
        "disaggregation(?:-.*)?",
        "Prefill and decode apart beside merged ones, on one GPU and on two",
        "`level` -1 is an engine as it is, or one on each of two GPUs (`replicas`); 0 has steps of prompts or of "
        "decodes alone, 1 a GPU for prompts and one for decodes. The last rows compare level 1 with replicas at equal "
        "load.",
    ),
    Section(
        "disaggregation_simulated",
        "Prefill and decode on GPUs of their own, simulated",
        "On as many GPUs as replicas, all at once and at loads.",
    ),
    Section(
        "meshes",
        "Steps of models that several GPUs of a host share, estimated",
        "Of one H200's steps and exchanges measured between two GPUs. How far such estimates are from steps measured "
        "on two and four is [another table](#how-far-simulated-and-estimated-figures-are-from-measured-ones).",
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
                of(part="table"),
            ),
            Table(("device", "backend", "steps", "least", "most", "largest"), "the largest errors", of(part="error")),
            Table(
                ("device", "backend", "batch", "context", "measured_ms", "estimated_ms", "off_by", "file"),
                "measured steps, and what would have been estimated",
                of(part="check"),
            ),
        ),
        estimated_within,
    ),
    Section("kv_choices.*", "KV policy, slots and page size by simulation"),
)  # fmt: skip
