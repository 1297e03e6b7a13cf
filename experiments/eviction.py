"""Evicts tokens from a cache as StreamingLLM does (arXiv 2309.17453), and reads texts through it or through a full
cache."""

from dataclasses import dataclass, replace

import jax
import jax.numpy as jnp
import numpy as np

from jllm.analysis.protocols import Window
from jllm.analysis.scoring import Reader, Sizes, lay_out, read_states
from jllm.config import LlamaConfig
from jllm.model.backbone import backbone
from jllm.model.cache import Cache, make_cache, parse_kv_cache
from jllm.model.model import Model
from jllm.model.paged import Chunks, no_segments
from jllm.model.rope import angles
from pallas_kernels.formats.kv_pages import KVPages, Pages
from pallas_kernels.rotary import rotate

PAGE = 16  # tokens


@dataclass(frozen=True)
class Policy:
    """The tokens that a cache keeps: the first `sinks` and the last `recent` ones. It evicts after every `chunk` that
    is read."""

    sinks: int
    recent: int
    chunk: int = 64

    @property
    def name(self) -> str:
        return f"{self.sinks}+{self.recent}"


def evict(cache: Cache, texts: int, policy: Policy, gone: int, config: LlamaConfig) -> Cache:
    """Returns a cache of `texts` sequences without the `gone` tokens after each one's sinks. Sequences have equally
    many pages, in order. Later keys are rotated back by as many positions, so no unrotated copy is needed. Zeros follow
    the kept tokens. K and V must be floats."""
    kept = np.r_[: policy.sinks, policy.sinks + gone : policy.sinks + gone + policy.recent]
    back = jnp.where(jnp.arange(len(kept)) < policy.sinks, 0, -gone)
    scaling = config.rope_scaling  # stored keys have its attention factor already
    unscaled = config if scaling is None else replace(config, rope_scaling=replace(scaling, attention_factor=1.0))

    def shorter(pages: Pages, turns: bool) -> Pages:
        N, K, P, D = pages.values.shape
        held = pages.layers * texts
        rows = pages.values.reshape(held, -1, K, P, D).swapaxes(2, 3).reshape(held, -1, K, D)  # [L B, tokens, K, D]
        room, rows = rows.shape[1] - len(kept), rows[:, kept]
        if turns:
            cos, sin = angles(unscaled, back, rows.dtype)
            rows = jax.vmap(lambda text: rotate(text, cos, sin))(rows)
        rows = jnp.pad(rows, ((0, 0), (0, room), (0, 0), (0, 0)))
        return replace(pages, values=rows.reshape(N, P, K, D).swapaxes(1, 2))

    return KVPages(shorter(cache.k, True), shorter(cache.v, False))


def read(model: Model, ids: np.ndarray, kv: str, policy: Policy | None = None, last: int = 0) -> np.ndarray:
    """Returns hidden states [B, L - 1, E] of the inputs of texts i32[B, L], through the paged cache. With a policy, K
    and V are in the model's dtype. The `last` inputs are read together, without eviction between them."""
    B, L = ids.shape
    if policy is None:
        windows = [Window(i, 0, 1, L) for i in range(B)]
        sizes = Sizes.of(windows, slots=4, tokens=1024, page_size=PAGE)
        return np.stack(read_states(Reader(model, kv), list(ids), windows, sizes, None))
    dtype = model.params.dtype
    pages = -(-(policy.sinks + policy.recent + max(policy.chunk, last)) // PAGE)  # pages per text
    cache = make_cache(model.config, B * pages, PAGE, parse_kv_cache(None, model.config, dtype))
    states, held = [], 0
    ends = [*range(policy.chunk, L - 1 - last, policy.chunk), L - 1 - last, *([L - 1] if last else ())]
    for start, end in zip([0, *ends], ends):
        at, count = (np.full(B, n, np.int32) for n in (held, end - start))
        table = np.arange(B * pages, dtype=np.int32).reshape(B, pages)
        rows = Chunks(ids[:, start:end].reshape(-1), at, count, table)  # type: ignore[arg-type]
        paged = lay_out(no_segments(pages), rows, num_pages=B * pages, page_size=PAGE)
        x, new = backbone(model.params, model.config, paged, cache)
        assert new is not None
        states.append(np.asarray(x).reshape(B, end - start, -1))
        held, cache = held + end - start, new
        if (gone := held - policy.sinks - policy.recent) > 0:
            held, cache = held - gone, evict(cache, B, policy, gone, model.config)
    return np.concatenate(states, axis=1)
