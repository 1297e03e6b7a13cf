"""The library itself: starts, tracing, loading."""

from experiments.report.answers import starts
from experiments.report.sections.section import Section, Table

LIBRARY = (
    Section(
        "ceilings",
        "A device's ceilings, which floors count with",
        "The best of each quantity is a limit of that device: bytes or operations a second of one kernel.",
        (Table(("quantity", "what", "us", "rate", "unit", "error"), "all"),),
    ),
    Section("train_length_predictor", "Training of the output length predictor"),
    Section("first_command", "The first command, from start to the last of 64 tokens"),
    Section(
        "start_up.*",
        "An engine's start, from its weights to the first token",
        "Cold, and warm: with the compiled steps that the cold start left in files. Each in a process of its own; "
        "beside a cold one `processes` others may trace steps.",
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
