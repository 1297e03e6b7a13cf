"""Which samples of a step have guides, and the drafts that they verify."""

from collections.abc import Callable
from typing import Any

from jllm.engine.device import InFlight
from jllm.engine.samples import Live
from jllm.engine.sequence import Sequence
from jllm.guides.matcher import Guided

Proposed = tuple[Any, Any]  # Outputs.drafts on the host


def guided_samples(
    step: InFlight, live: Callable[[Sequence], Live | None], proposed: Proposed | None
) -> tuple[list[Live], list[Guided]]:
    """Returns the samples with guides that a step draws of, once the step before it was read, which proposed drafts."""
    plan, most_rows = step.plan, step.bucket.rows  # which may be fewer than were planned
    rows = {**dict(zip(plan.decodes, plan.rows)), **{chunk.seq: 1 for chunk in plan.chunks if chunk.final}}
    lives, samples = [], []
    for seq, most in rows.items():
        sample = live(seq)
        if sample is None or sample.matcher is None:
            continue
        drafts = []
        if proposed is not None:
            tokens, count = proposed
            drafts = tokens[seq.slot, : min(int(count[seq.slot]), most - 1, most_rows - 1)].tolist()
        lives.append(sample)
        samples.append(Guided(sample.matcher, seq.output, drafts))
    return lives, samples
