"""Defines the options of an engine, and checks its sizes against the model before anything is allocated."""

import os
from collections.abc import Mapping
from collections.abc import Sequence as List
from dataclasses import dataclass, fields
from numbers import Integral
from typing import Any, TypedDict

from jllm.config import LlamaConfig
from jllm.engine.kv_policy import Policy, policy_of
from jllm.engine.plan import most_deltas
from jllm.engine.trace import Sink
from jllm.errors import ConfigError
from jllm.files.hf_fields import MOST
from jllm.model.adapters import check_rank
from jllm.model.cache import KVCache, shared_block
from jllm.model.hooks import Hooks
from jllm.model.paged import PAGE_SIZE
from jllm.programs.sizes import EngineSizes, Limits
from jllm.speculative.drafter import Drafter
from jllm.speculative.tree import MOST_NODES
from jllm.step.buckets import Bucket, make_buckets
from pallas_kernels.backends import DETERMINISTIC, OF_MODELS
from pallas_kernels.formats.kv_formats import KVFormat

PAGE_SIZES = (8, 16, 32, 64, 128)
MAX_SLOTS = 16  # the default
RANK = 16  # of adapters, by default
MOST_PROCESSES = 64  # tracing processes: each is a Python with JAX
MOST_DRAFTS = MOST_NODES // 2  # drafts in a chain
_POLICY = "it belongs to a KV policy now, so give kv_policy="
GONE = {  # removed options, and their successors
    "acceptance": "drafts are accepted only where they equal the request's own sample, so leave it out",
    "length_predictor": f"{_POLICY}Predicted(predictor) or Extent(predictor) (jllm/kv_policies)",
    "admission_quantile": f"{_POLICY}Predicted(predictor, quantile=...) (jllm/kv_policies)",
    "watermark": f"{_POLICY}OnDemand(watermark=...) (jllm/kv_policies)",
    "extent_overflow": f"{_POLICY}Extent(overflow=...) (jllm/kv_policies)",
}
MOST_DRAFT_ROWS = 256  # rows of a step with drafts: with more, a GPU is bound by compute, and drafts cannot pay


@dataclass(frozen=True)
class EngineOptions:
    """Holds the options of an engine; None means a default that depends on the model and the device."""

    max_slots: int = MAX_SLOTS  # sequences that run at once
    page_size: int = PAGE_SIZE  # tokens a KV page
    num_pages: int | None = None  # pages in the pool; default: every slot's whole context, or as many as fit
    max_step_tokens: int | None = None  # tokens in a step; default: max(256, 2 * max_slots)
    # KV format, e.g. "int8-g8" or "k=int8-g8,v=int4-g32", or an object, or two for K and V; default: the model's dtype.
    kv_cache: KVCache | None = None
    buckets: tuple[Bucket, ...] | None = None  # compiled sizes; default: make_buckets
    backend: str | None = None  # backend of the kernels, one of OF_MODELS; default: chosen for the device
    deterministic: bool = False  # a row's bits do not depend on how many rows are computed with it (docs/sampling.md)
    kv_policy: str | Policy = "paged"  # who gets pages when: a name or an object of jllm/kv_policies
    prefix_cache: bool = True  # pages outlive their requests, for others that begin alike (engine/prefix_cache.py)
    # Speculative decoding: a step verifies drafts, which change no token (jllm/speculative).
    speculate: str | Drafter | None = None  # a name (engine/drafters.py), or a drafter; default: none
    drafts: int | None = None  # drafts of each sequence in a step; default: some, where they pay
    hooks: Hooks | None = None  # the caller's functions inside the steps
    taps: List[str] | None = None  # names of values (model/taps.py) that requests may ask for; default: none
    tap_rows: int | None = None  # most rows of these in a step, which are device memory; default: max_step_tokens
    # Adapters (docs/adapters.md): PEFT directories or pytrees by name; later ones by engine.adapters.load.
    adapters: Mapping[str, Any] | None = None
    max_adapters: int | None = None  # places on the device; default: as many as `adapters` has
    adapter_rank: int | None = None  # the largest rank; default: the largest of `adapters`, or 16
    adapter_targets: tuple[str, ...] | None = None  # modules that adapters may change, e.g. "q_proj"; default: all
    executables: str | os.PathLike | None = None  # a folder for compiled steps, for the next start (executables.py)
    # Further processes that trace steps compiled ahead (tracing.py). Default: with `executables` on a GPU half of the
    # cores, at most 8; else none.
    compile_processes: int | None = None
    progress: bool | None = None  # whether standard error shows compilation; default: only a terminal does
    trace: Sink | None = None  # the file, or the list, that records the schedule (engine/trace.py)

    def __post_init__(self):
        for name in ("max_slots", "num_pages", "max_step_tokens", "tap_rows", "max_adapters", "adapter_rank"):
            value = getattr(self, name)
            if value is not None and (not isinstance(value, Integral) or isinstance(value, bool) or value < 1):
                raise ConfigError(f"{name} must be an integer >= 1, not {value!r}")
            if value is not None and int(value) > MOST:
                raise ConfigError(f"{name} must be at most {MOST}, not {value}")
        if not isinstance(self.page_size, Integral) or self.page_size not in PAGE_SIZES:
            raise ConfigError(f"page_size must be one of {', '.join(map(str, PAGE_SIZES))}, not {self.page_size!r}")
        buckets = self.buckets is None or isinstance(self.buckets, tuple)
        if not buckets or not all(isinstance(bucket, Bucket) for bucket in self.buckets or ()):
            raise ConfigError(f"buckets must be a tuple of Bucket, not {self.buckets!r}")
        pair = isinstance(self.kv_cache, tuple) and [isinstance(fmt, KVFormat) for fmt in self.kv_cache] == [True, True]
        if not pair and not isinstance(self.kv_cache, str | KVFormat | None):
            raise ConfigError(f"kv_cache must be the name of a format, a KVFormat or two, not {self.kv_cache!r}")
        if self.backend is not None and self.backend not in OF_MODELS:
            raise ConfigError(f"backend must be one of {', '.join(OF_MODELS)}, not {self.backend!r}")
        if not isinstance(self.deterministic, bool):
            raise ConfigError(f"deterministic must be True or False, not {self.deterministic!r}")
        if self.deterministic and self.backend is not None:
            raise ConfigError(f"deterministic chooses the kernels: leave backend={self.backend!r} out")
        if not isinstance(self.prefix_cache, bool):
            raise ConfigError(f"prefix_cache must be True or False, not {self.prefix_cache!r}")
        if not isinstance(self.progress, bool | None):
            raise ConfigError(f"progress must be True, False or None, not {self.progress!r}")
        some = self.compile_processes
        number = isinstance(some, Integral) and not isinstance(some, bool) and 0 <= int(some) <= MOST_PROCESSES
        if some is not None and not number:
            raise ConfigError(f"compile_processes must be an integer from 0 to {MOST_PROCESSES}, not {some!r}")
        if not isinstance(self.executables, str | os.PathLike | None):
            raise ConfigError(f"executables must be the path of a folder, not {self.executables!r}")
        if self.trace is not None and not isinstance(self.trace, Sink):
            raise ConfigError(f"trace must be the path of a file or a list, not {self.trace!r}")
        policy_of(self.kv_policy)
        if not isinstance(self.speculate, str | Drafter | None):
            kind = type(self.speculate).__name__
            raise ConfigError(f"speculate must be the name of a drafter, or a drafter, not {kind}")
        if not isinstance(self.hooks, Hooks | None):
            raise ConfigError(f"hooks must be jllm.Hooks, not {type(self.hooks).__name__}")
        if self.hooks is not None and self.hooks.observe is not None and self.speculate is not None:
            raise ConfigError("hooks.observe sees tokens once they are drawn, too late for drafts: leave speculate out")
        if self.adapter_rank is not None:
            check_rank(int(self.adapter_rank))
        if self.max_adapters is None:
            for name in ("adapter_rank", "adapter_targets"):
                if getattr(self, name) is not None and not self.adapters:
                    raise ConfigError(f"{name} has no meaning without adapters: give max_adapters")
        if isinstance(self.taps, str) or not all(isinstance(name, str) for name in self.taps or ()):
            raise ConfigError(f"taps must be a list of names, not {self.taps!r}")
        if self.tap_rows is not None and not self.taps:
            raise ConfigError("tap_rows has no meaning without taps: leave it out")
        if self.drafts is not None:
            check_drafts(self.drafts, self.speculate)
        if isinstance(self.speculate, Drafter) and self.speculate.tree.size == 1:
            raise ConfigError(f"{type(self.speculate).__name__} makes no drafts: its tree is the root alone")

    @property
    def kernels(self) -> str | None:
        """Returns the backend of all steps."""
        return DETERMINISTIC if self.deterministic else self.backend

    @property
    def adapter_places(self) -> int:
        """Returns how many adapters have a place on the device."""
        return len(self.adapters or ()) if self.max_adapters is None else self.max_adapters

    @property
    def rank(self) -> int:
        """Returns the largest rank of an adapter."""
        return RANK if self.adapter_rank is None else self.adapter_rank

    @property
    def memory(self) -> dict[str, Any]:
        """Returns the options that decide about memory, as plain data."""
        found = {name: getattr(self, name) for name in ("kv_policy", "kv_cache", "prefix_cache")}
        if not isinstance(self.kv_policy, str):
            found["kv_policy"] = type(self.kv_policy).__name__
        if not isinstance(self.kv_cache, str | None):
            formats = (self.kv_cache,) if isinstance(self.kv_cache, KVFormat) else self.kv_cache
            found["kv_cache"] = ",".join(fmt.name for fmt in formats)
        return found

    def make_policy(self) -> Policy:
        """Returns the KV policy. A policy given by name is new each time, and so is everything that it learns."""
        return policy_of(self.kv_policy)


def check_drafts(drafts: object, speculate: str | Drafter | None) -> None:
    """Raises ConfigError for an invalid number of drafts."""
    if speculate is None:
        raise ConfigError("drafts has no meaning without speculate: leave it out")
    if not isinstance(drafts, Integral) or isinstance(drafts, bool) or not 0 < int(drafts) <= MOST_DRAFTS:
        raise ConfigError(f"drafts must be an integer from 1 to {MOST_DRAFTS}, not {drafts!r}")
    if not isinstance(speculate, str) and int(drafts) != speculate.tree.size - 1:
        raise ConfigError(f"drafts={drafts}, but the drafter makes {speculate.tree.size - 1}: leave it out")


class EngineKeywords(TypedDict, total=False):
    """Lists EngineOptions as keyword arguments, for editors and type checkers; None stands for the default."""

    max_slots: int | None
    page_size: int | None
    num_pages: int | None
    max_step_tokens: int | None
    kv_cache: KVCache | None
    buckets: tuple[Bucket, ...] | None
    backend: str | None
    deterministic: bool | None
    kv_policy: str | Policy | None
    prefix_cache: bool | None
    speculate: str | Drafter | None
    drafts: int | None
    hooks: Hooks | None
    taps: List[str] | None
    tap_rows: int | None
    adapters: Mapping[str, Any] | None
    max_adapters: int | None
    adapter_rank: int | None
    adapter_targets: tuple[str, ...] | None
    executables: str | os.PathLike | None
    compile_processes: int | None
    progress: bool | None
    trace: Sink | None


def make_options(given: Mapping[str, Any]) -> EngineOptions:
    """Returns EngineOptions from keyword arguments; None stands for the default. Raises ConfigError for an unknown
    name."""
    names = [f.name for f in fields(EngineOptions)]
    for name in given:
        if name in GONE:
            raise ConfigError(f"engine option {name!r} is gone: {GONE[name]}")
        if name not in names:
            raise ConfigError(f"unknown engine option {name!r}; known are {', '.join(names)}")
    return EngineOptions(**{name: value for name, value in given.items() if value is not None})


def drafter_of(options: EngineOptions) -> Drafter | None:
    """Returns the drafter in the options. Raises ConfigError for a name, which drafters.with_drafter must replace
    first."""
    if isinstance(options.speculate, str):
        raise ConfigError(f"speculate={options.speculate!r} is a name: give the drafter that it stands for")
    return options.speculate


def resolve(options: EngineOptions, config: LlamaConfig, affordable_pages: int) -> EngineSizes:
    """Fills in defaults; affordable_pages is how many pages the device's memory can hold."""
    P, S = options.page_size, options.max_slots
    whole = -(-config.context // P)
    num_pages = options.num_pages or max(S, min(S * whole, affordable_pages))
    tokens = options.max_step_tokens or max(256, 2 * S)
    buckets = make_buckets(S, tokens) if options.buckets is None else options.buckets
    top = Bucket(S, max((r.tokens for r in buckets), default=0), max((r.chunks for r in buckets), default=0))
    if not any(r.decodes >= S and r.tokens >= max(1, top.tokens) and r.chunks >= max(1, top.chunks) for r in buckets):
        largest = f"{S} decode rows (max_slots) and as many prompt tokens and chunks as any other, at least one"
        add = f"add Bucket({S}, {max(1, top.tokens)}, {max(1, top.chunks)}) to buckets"
        lower = max(
            (r.decodes for r in buckets if r.tokens and (r.tokens, r.chunks) == (top.tokens, top.chunks)), default=0
        )
        less = f", or lower max_slots to {lower}" if 0 < lower < S else ""
        raise ConfigError(f"buckets must have one that holds {largest}: {add}{less}")
    if any(r.tokens and not r.chunks for r in buckets):
        raise ConfigError("a bucket with prompt tokens must have chunks")
    drafter = drafter_of(options)
    rows = 1 if drafter is None else drafter.tree.size
    short = min(S, MOST_DRAFT_ROWS // rows, tokens // rows)
    if rows > 1 and not short:
        most = min(MOST_DRAFT_ROWS, tokens)
        raise ConfigError(f"{rows - 1} drafts and a token are more rows than the {most} of a step: give fewer drafts")
    if any(r.rows not in (1, rows) or (r.rows > 1 and r.tokens) for r in buckets):
        raise ConfigError(f"a bucket's rows must be 1, or {rows} of one without prompt tokens")
    if rows > 1 and all(r.rows == 1 for r in buckets):
        sizes = sorted({min(r.decodes, short) for r in buckets if not r.tokens} | {short})
        buckets = (*buckets, *(Bucket(r, 0, 0, rows) for r in sizes))
    limits = Limits(
        max_slots=S,
        max_step_tokens=tokens,
        max_prompt_tokens=top.tokens,
        max_chunks=top.chunks,
        page_size=P,
        num_pages=num_pages,
        max_deltas=most_deltas(S, tokens, P, rows),
        short_rows=rows,
        short_decodes=max((r.decodes for r in buckets if r.rows >= rows), default=short),
        block=shared_block(options.kv_cache, config),
        tap_rows=(options.tap_rows or tokens) if options.taps else None,
    )
    if limits.tap_rows is not None and limits.tap_rows < rows:
        raise ConfigError(f"tap_rows must be at least {rows}, the rows of a sequence in a step, not {limits.tap_rows}")
    return EngineSizes(limits, min(whole, num_pages), buckets)
