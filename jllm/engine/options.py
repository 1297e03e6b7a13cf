"""Sizes of an engine, checked against the model before anything is allocated."""

from dataclasses import dataclass

from jllm.batch import Rung, make_ladder
from jllm.config import LlamaConfig
from jllm.engine.scheduler import Limits
from jllm.errors import ConfigError

PAGE_SIZES = (8, 16, 32, 64, 128)


@dataclass(frozen=True)
class EngineOptions:
    """What the caller may choose; None means a default that depends on the model and the device."""

    max_slots: int = 16  # sequences that run at once
    page_size: int = 16  # tokens a KV page
    num_pages: int | None = None  # pages in the pool; default: every slot's whole context, as far as memory goes
    max_step_tokens: int | None = None  # tokens in a step; default: max(256, max_slots)
    kv_cache: str | None = None  # KV format, e.g. "int8-g8" or "k=int8-g8,v=int4-g32"; default: the model's dtype
    ladder: tuple[Rung, ...] | None = None  # compiled sizes; default: at most 15 of them
    backend: str | None = None  # kernels: "xla", "reference"; default: chosen for the device

    def __post_init__(self):
        for name in ("max_slots", "num_pages", "max_step_tokens"):
            value = getattr(self, name)
            if value is not None and (not isinstance(value, int) or value < 1):
                raise ConfigError(f"{name} must be an integer >= 1, not {value!r}")
        if self.page_size not in PAGE_SIZES:
            raise ConfigError(f"page_size must be one of {', '.join(map(str, PAGE_SIZES))}, not {self.page_size!r}")


@dataclass(frozen=True)
class Sizes:
    """The options made definite."""

    limits: Limits
    context: int  # most tokens of a sequence
    max_pages: int  # M
    ladder: tuple[Rung, ...]


def resolve(options: EngineOptions, config: LlamaConfig, affordable_pages: int) -> Sizes:
    """Fills in defaults; affordable_pages is what the device's memory can hold."""
    P, S = options.page_size, options.max_slots
    max_pages = -(-config.context // P)
    num_pages = options.num_pages or max(S, min(S * max_pages, affordable_pages))
    tokens = options.max_step_tokens or max(256, S)
    ladder = options.ladder or make_ladder(S, tokens)
    if max(r.decodes for r in ladder) < S or max(r.tokens for r in ladder) < tokens:
        raise ConfigError(f"the ladder's largest rung must hold {S} decode rows and {tokens} prompt tokens")
    limits = Limits(
        max_slots=S,
        max_step_tokens=tokens,
        max_chunks=max(r.chunks for r in ladder),
        page_size=P,
        num_pages=num_pages,
        max_deltas=2 * S + -(-tokens // P),
    )
    return Sizes(limits, min(config.context, num_pages * P), max_pages, ladder)
