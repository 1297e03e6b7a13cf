"""Defines the sizes of an engine, with all defaults filled in."""

from dataclasses import dataclass, fields

from jllm.errors import ConfigError
from jllm.step.buckets import FEW_SLOTS, Bucket


@dataclass(frozen=True)
class Limits:
    """Holds sizes that no plan exceeds.

    In a step each decoding slot has the rows of a short segment. It has at most one new page that is not for drafts.
    Hence max_step_tokens >= max_slots and short_decodes * short_rows, and max_deltas >= max_slots. So the decodes
    always fit, and a slot that prefills can always add a token.
    """

    max_slots: int  # sequences that run at once
    max_step_tokens: int  # decodes and prompt tokens in a step
    max_prompt_tokens: int  # prompt tokens in a step
    max_chunks: int  # prompt chunks in a step
    page_size: int  # tokens a page
    num_pages: int
    max_deltas: int  # page table changes in a step
    short_rows: int = 1  # Q: rows of a short segment: a sequence's newest token and its drafts
    short_decodes: int | None = None  # most decodes of a step in which they have several rows; None: max_slots
    block: int = 1  # a reused prefix has a multiple of this many tokens
    tap_rows: int | None = None  # rows in a step whose values requests may ask for; None: no request may

    def __post_init__(self):
        for f in fields(self):
            value = getattr(self, f.name)
            if value is not None and value < 1:
                raise ConfigError(f"{f.name} must be at least 1, not {value}")
        for name, unit in (("max_step_tokens", "token"), ("num_pages", "page"), ("max_deltas", "page table change")):
            if getattr(self, name) < self.max_slots:
                least = f"max_slots = {self.max_slots} (one {unit} a slot)"
                raise ConfigError(f"{name} must be at least {least}, not {getattr(self, name)}")
        if self.max_step_tokens < self.most_short * self.short_rows:
            least = f"{self.most_short} decodes of {self.short_rows} rows"
            raise ConfigError(f"max_step_tokens must be at least {least}, not {self.max_step_tokens}")

    @property
    def most_short(self) -> int:
        """Returns short_decodes, or its default."""
        return self.max_slots if self.short_decodes is None else self.short_decodes


@dataclass(frozen=True)
class StepSizes:
    """Holds the compiled sizes, for a scheduler that avoids padding. Without sizes it takes all that there is."""

    mixed: tuple[tuple[int, int], ...] = ()  # (decode rows, prompt tokens) of steps with prompts
    full: tuple[int, ...] = ()  # prompt tokens of steps in which every slot may decode; empty up to FEW_SLOTS slots
    decodes: tuple[int, ...] = ()  # decode rows above FEW_SLOTS of steps without prompts


NO_SIZES = StepSizes()


@dataclass(frozen=True)
class EngineSizes:
    """Holds an engine's limits and compiled sizes."""

    limits: Limits
    max_pages: int  # M: pages of the whole context, or of the pool if that is smaller
    buckets: tuple[Bucket, ...]

    def most_tokens(self, context: int) -> int:
        """Returns how many tokens one sample may have: the context, or fewer if the pool is smaller.

        The very last token never gets K and V.
        """
        return min(context, self.limits.num_pages * self.limits.page_size + 1)

    @property
    def steps(self) -> StepSizes:
        """Returns the sizes of steps, ascending. A size that cannot hold a chunk for each of its tokens or slots is
        left out."""
        slots, alone = self.limits.max_slots, {r.decodes for r in self.buckets if not r.tokens}
        mixed = {(r.decodes, r.tokens) for r in self.buckets if r.tokens and r.chunks >= min(slots, r.tokens)}
        full = {tokens for decodes, tokens in mixed if decodes >= slots > FEW_SLOTS}
        return StepSizes(
            tuple(sorted(mixed)), tuple(sorted(full)), tuple(sorted(rows for rows in alone if rows > FEW_SLOTS))
        )
