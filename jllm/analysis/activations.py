"""Shows what happens inside a model: named values of prefill and decode, and the error of the residual stream after
each layer."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np

from jllm.config import LlamaConfig
from jllm.errors import EvaluationError
from jllm.model.backbone import Taps, backbone, head, head_taps, tapped_backbone
from jllm.model.cache import Cache, KVCache, make_cache, make_tails, parse_kv_cache, with_tails
from jllm.model.model import Model
from jllm.model.paged import Chunks, Packed, Paged, ShortSegments, no_chunks, no_segments, paged_batch
from jllm.model.params import Params
from jllm.model.taps import resolve_taps
from pallas_kernels.formats.numerics import compute_dtype
from pallas_kernels.formats.segments import MOST_ROWS

_run = partial(jax.jit, static_argnames=("config", "backend"))(
    lambda params, config, batch, backend: backbone(params, config, batch, None, backend=backend)[0]
)

_lay_out = jax.jit(paged_batch, static_argnames=("num_pages", "page_size"))


@dataclass(frozen=True)
class LayerError:
    """Holds the distance of the residual stream after a layer from a reference's."""

    layer: int  # from 1; 0 is the embedding
    snr_db: float  # 10 log10(|reference|^2 / |difference|^2), inf if equal
    largest: float  # largest absolute activation of the model
    channel: int  # its channel
    largest_reference: float


def residuals(model: Model, tokens: Sequence[int], *, backend: str | None = None) -> Iterator[jax.Array]:
    """Yields [T, E] for one sequence i32[T]: the embedding, then the residual stream after each layer.

    A layer runs as a model of its own: its embedding is the stream so far, and its tokens are 0 .. T - 1. All layers of
    one attention window share a compiled function. The time is linear in the number of layers.
    """
    ids = _check_tokens(model, tokens)
    rows = jnp.arange(len(ids), dtype=jnp.int32)
    batch = Packed(jnp.asarray(ids, jnp.int32), rows, jnp.zeros_like(rows))
    x = _run(replace(model.params, layers=()), model.config, batch, backend)
    yield x
    batch = replace(batch, tokens=rows)
    for i, layer in enumerate(model.params.layers):
        config = model.config.one_layer(i)
        x = _run(replace(model.params, embed=x, head=None, layers=(layer,)), config, batch, backend)
        yield x


def tap(
    model: Model,
    tokens: Sequence[int],
    names: Sequence[str],
    *,
    prompt: int | None = None,
    kv_cache: KVCache | None = None,
    page_size: int = 16,
    segment: int = 1,
    backend: str | None = None,
) -> Taps:
    """Returns the values [T, ...] of `names` (see jllm.model.taps) by name, as serving computes them.

    tokens: one sequence i32[T]. prompt: number of tokens in the prompt (None: all). segment: rows per decode step, as
    for drafted tokens; the last segment may have fewer. kv_cache: format of the paged cache.

    Raises EvaluationError for unknown names, and for tokens that the model cannot take.
    """
    ids = _check_tokens(model, tokens)
    T, c = len(ids), model.config
    first = T if prompt is None else prompt
    if not 0 < first <= T <= c.context:
        raise EvaluationError(f"prompt must be in 1 .. {T}, the tokens, and those at most {c.context}, not {first}")
    if not 0 < segment <= MOST_ROWS:
        raise EvaluationError(f"segment must be in 1 .. {MOST_ROWS}, not {segment}")
    taps = resolve_taps(names, c.num_layers)
    pages = -(-T // page_size)
    formats, dtype = parse_kv_cache(kv_cache, c, model.params.dtype), model.params.dtype
    cache = with_tails(make_cache(c, pages, page_size, formats), make_tails(c, formats, dtype, 1, page_size, segment))
    parts: list[Taps] = []
    for start, stop in [(0, first), *((i, min(T, i + segment)) for i in range(first, T, segment))]:
        batch = _paged(ids[start:stop], start, pages, page_size, width=segment if start else None)
        cache, found = _tap_step(model.params, cache, batch, config=c, taps=taps, backend=backend)
        parts.append({name: value[: stop - start] for name, value in found.items()})
    return {name: jnp.concatenate([part[name] for part in parts]) for name in taps}


def _paged(ids: np.ndarray, start: int, pages: int, page_size: int, *, width: int | None) -> Paged:
    """Returns the batch of tokens start .. start + T of a sequence with pages 0 .. pages. It is a segment of `width`
    rows, or a prompt's chunk (None)."""
    table, at, n = np.arange(pages, dtype=np.int32)[None], np.full(1, start, np.int32), np.full(1, len(ids), np.int32)
    if width is not None:
        padded = np.pad(ids, (0, width - len(ids)))[None]
        rows = ShortSegments(padded, at, n, table), no_chunks(pages)  # type: ignore[arg-type]
    else:
        rows = no_segments(pages), Chunks(ids, at, n, table)  # type: ignore[arg-type]
    one = np.zeros(1, np.int32), np.zeros(0, np.int32)  # the slot of either
    slots = one if width is not None else one[::-1]
    return _lay_out(*rows, num_pages=pages, page_size=page_size, slots=slots)


@partial(jax.jit, static_argnames=("config", "taps", "backend"), donate_argnames="cache")
def _tap_step(
    params: Params, cache: Cache, batch: Paged, *, config: LlamaConfig, taps: tuple[str, ...], backend: str | None
) -> tuple[Cache, Taps]:
    hidden, updated, found = tapped_backbone(params, config, batch, cache, taps, backend=backend)
    assert updated is not None
    wanted = {"norm", "logits"} & set(taps)
    logits = head(params, config, hidden, backend=backend) if wanted else hidden
    return updated, found | head_taps(params, config, hidden, logits, taps, backend=backend)


def _check_tokens(model: Model, tokens: Sequence[int]) -> np.ndarray:
    """Returns the tokens as i32[T]. Raises EvaluationError for invalid ones."""
    ids = np.asarray(tokens)
    size = model.config.vocab_size
    if ids.ndim != 1 or not ids.size or not np.issubdtype(ids.dtype, np.integer):
        raise EvaluationError(f"tokens must be a list of token ids, at least one, not {ids.dtype}{list(ids.shape)}")
    if ids.min() < 0 or ids.max() >= size:
        raise EvaluationError(f"token ids must be in [0, {size}), the model's vocabulary")
    return ids.astype(np.int32)


def compare_layers(
    model: Model, reference: Model, tokens: Sequence[int], *, backend: str | None = None
) -> tuple[LayerError, ...]:
    """Returns L + 1 entries, from the embedding to the last layer. Raises EvaluationError for models of different
    shapes."""
    a, b = ((m.config.vocab_size, m.config.num_layers, m.config.hidden_size) for m in (model, reference))
    if a != b:
        raise EvaluationError(f"the models must have the same vocabulary, layers and width, not {a} and {b}")
    pairs = zip(residuals(model, tokens, backend=backend), residuals(reference, tokens, backend=backend), strict=True)
    return tuple(_error(i, *jax.device_get(_compare(x, y))) for i, (x, y) in enumerate(pairs))


@jax.jit
def _compare(x: jax.Array, reference: jax.Array) -> tuple[jax.Array, ...]:
    """Returns the squared norms of the reference and of the difference. Then come the largest entries per channel of x
    and of the reference."""
    dtype = compute_dtype(reference.dtype)
    x, y = x.astype(dtype), reference.astype(dtype)
    return jnp.sum(y * y), jnp.sum((x - y) ** 2), jnp.abs(x).max(axis=0), jnp.abs(y).max()


def _error(layer: int, signal: np.ndarray, noise: np.ndarray, largest: np.ndarray, reference: np.ndarray) -> LayerError:
    snr = math.inf if noise == 0 else 10 * math.log10(float(signal) / float(noise)) if signal > 0 else -math.inf
    channel = int(largest.argmax())
    return LayerError(layer, snr, float(largest[channel]), channel, float(reference))
