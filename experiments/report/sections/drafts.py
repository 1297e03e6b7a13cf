"""Drafts of speculative decoding."""

from experiments.report.answers import of_bars
from experiments.report.sections.section import Section, Table, having

DRAFTS = (
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
                having("times"),
            ),
            Table(
                ("workload", "temperature", "drafter", "depth", "documents", "acceptance", "acceptance_95"),
                "share of steps with a draft of this depth that accepted it",
                having("depth"),
            ),
        ),
        of_bars("{:.2f} times as fast with n-gram drafts on repetitive text", "^ngram"),
    ),
    Section(
        "speculation-claims.*",
        "Drafts: what is claimed of them",
        "`python -m experiments.speculation claims --help` says what the columns mean.",
        (Table(("claim", "stated", "measured", "verdict"), "verdicts", having("verdict")),),
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
                having("step_ms"),
            ),
            Table(
                (
                    "batch", "context", "Q", "published", "tokens_a_step", "times_here", "their_times",
                    "tokens_needed", "source",
                ),
                "what published figures would give, or take, by these steps",
                having("published"),
            ),
        ),
    ),
)  # fmt: skip
