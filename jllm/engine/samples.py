"""What the loop knows of unfinished samples beyond what the scheduler does, and what it makes of a step's outputs."""

from collections.abc import Callable, Collection
from dataclasses import dataclass, field, replace

from jllm.engine.moved import Begun
from jllm.engine.output import OutputText
from jllm.engine.plan import StepPlan
from jllm.engine.request import Completion, SamplingParams, Timings, TokenLogprob
from jllm.engine.sequence import Sequence
from jllm.guides.matcher import Matcher
from jllm.step.state import NOT_FINITE, Outputs, Variant


@dataclass
class Live:
    """An unfinished sample."""

    seq: Sequence
    output: OutputText
    submitted: float
    matcher: Matcher | None = None  # of a guide
    first_token: float | None = None
    last_token: float = 0.0  # when the newest token was read, once there is one
    logprobs: list[TokenLogprob] = field(default_factory=list)
    taken: int = 0  # of these
    prompt_scores: dict[int, tuple[float, int, tuple[int, float]]] = field(default_factory=dict)  # by position: log p,
    # rank, and the most likely token with its log p
    plain: bool = field(init=False)  # nothing is asked of its tokens one by one but whether they end it
    ends: frozenset[int] = field(init=False)  # stop_ids, and what is no token

    def __post_init__(self):
        self.plain = not self.output.stops and self.seq.params.logprobs is None
        self.ends = self.seq.stop_ids | {-1, NOT_FINITE}

    def begun(self) -> Begun:
        """Returns it as far as it has come."""
        times, seq = (self.submitted, self.first_token, self.last_token), self.seq
        return Begun(seq.sample, tuple(seq.output), tuple(self.logprobs), self.prompt_scores, *times)

    def carry_on(self, begun: Begun) -> None:
        """It goes on from the tokens of another sample, whose times are its own from now on."""
        self.output.extend(begun.output)
        self.logprobs, self.prompt_scores = list(begun.logprobs), dict(begun.scores)
        self.submitted, self.first_token, self.last_token = begun.submitted, begun.first_token, begun.last_token

    def completion(self, reason: str, seconds: float, *, text: bool) -> Completion:
        """Returns the sample as it ended, `seconds` after its submission; text: whether there is a tokenizer."""
        seq, tokens = self.seq, tuple(self.output.tokens)
        scored = seq.params.prompt_logprobs
        scores = [score for _, score in sorted(self.prompt_scores.items())]
        return Completion(
            token_ids=tokens,
            text=self.output.text if text else None,
            finish_reason=reason,
            logprobs=None if seq.params.logprobs is None else tuple(self.logprobs[: len(tokens)]),
            prompt_logprobs=tuple(logprob for logprob, *_ in scores) if scored else None,
            timings=Timings(self.first_token, seconds, len(seq.prompt), len(tokens)),
            seed=seq.seed,
            prompt_ranks=tuple(rank for _, rank, _ in scores) if scored else None,
            prompt_best=tuple(best for *_, best in scores) if scored else None,
        )

    def keep(self, tokens: tuple[int, ...], outputs: Outputs, row: int) -> tuple[tuple[int, ...], str | None]:
        """Takes in the tokens that a step drew in its rows from `row` on. Returns those that count, up to the first
        that ends it, and the reason of its end; a number below 0 is no token."""
        seq, output = self.seq, self.output
        room = seq.max_length - len(seq.prompt) - len(seq.output)
        if self.plain and len(tokens) < room and self.ends.isdisjoint(tokens):  # as most are
            if not output.text_can_be_late:
                output.extend(tokens)
            return tokens, None
        for kept, token in enumerate(tokens, 1):
            if token < 0:
                return tokens[: kept - 1], "error" if token == NOT_FINITE else None
            if token in seq.stop_ids:
                return tokens[:kept], "stop"
            if outputs.logprobs is not None and seq.params.logprobs is not None:
                self.logprobs.append(token_logprob(token, outputs, row + kept - 1, seq.params.logprobs))
            if not output.text_can_be_late:
                output.push(token)
                if output.stopped:
                    return tokens[:kept], "stop"
            if kept == room:
                return tokens[:kept], "length"
        return tokens, None

    def take(self, *, final: bool) -> tuple[str, tuple[int, ...], tuple[TokenLogprob, ...]]:
        """Returns text and tokens that are certain by now and were not taken before, and what is known of these tokens
        where log-probabilities were asked for."""
        text, tokens = self.output.take(final)
        if self.seq.params.logprobs is None:
            return text, tokens, ()
        self.taken += len(tokens)
        return text, tokens, tuple(self.logprobs[self.taken - len(tokens) : self.taken])


@dataclass
class Samples:
    """Those of one request."""

    started: int = 0  # ever: the next sample index
    unfinished: dict[int, Live] = field(default_factory=dict)  # by sample index


def variant_for(samplings: Collection[SamplingParams], *, by_draws: bool = False) -> Variant:
    """Returns the step that serves all of these at once, their prompts included. by_draws: steps that draw in fewer
    ways are programs of their own (see gate.py)."""
    variant = Variant(
        penalties=any(p.penalizes for p in samplings),
        logprobs=any(p.logprobs is not None for p in samplings),
        prompt_logprobs=any(p.prompt_logprobs for p in samplings),
        guided=any(p.guide is not None for p in samplings),
    )
    if not by_draws or variant.takes_rows or not samplings:
        return variant
    return replace(variant, draws=max(p.draws for p in samplings))


def token_logprob(token: int, outputs: Outputs, row: int, n: int) -> TokenLogprob:
    """Returns the log-probability of the token sampled in a row, with the n most likely ones."""
    assert outputs.logprobs is not None
    assert outputs.top_ids is not None
    assert outputs.top_logprobs is not None
    top = zip(outputs.top_ids[row, :n].tolist(), outputs.top_logprobs[row, :n].tolist())
    return TokenLogprob(token, float(outputs.logprobs[row]), tuple(top))


def take_prompt_scores(plan: StepPlan, outputs: Outputs, live: Callable[[Sequence], Live | None]) -> None:
    """Gives the scores of a step's prompt tokens to the samples that asked for them."""
    assert outputs.prompt_logprobs is not None
    assert outputs.prompt_ranks is not None
    assert outputs.prompt_best is not None
    assert outputs.prompt_best_logprobs is not None
    best = zip(outputs.prompt_best.tolist(), outputs.prompt_best_logprobs.tolist())
    scores = list(zip(outputs.prompt_logprobs.tolist(), outputs.prompt_ranks.tolist(), best))
    at = 0
    for chunk in plan.chunks:
        sample = live(chunk.seq)
        if sample is not None and chunk.seq.params.prompt_logprobs:
            last = min(chunk.start + len(chunk.tokens), len(chunk.seq.prompt) - 1)
            for position in range(chunk.start, last):
                sample.prompt_scores[position + 1] = scores[at + position - chunk.start]
        at += len(chunk.tokens)
