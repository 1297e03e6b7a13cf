"""The residual stream after every layer, and how far quantization moves it: pure functions, no cache."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np

from jllm.errors import EvaluationError
from jllm.model import Packed, backbone
from jllm.pretrained import Model
from pallas_kernels.numerics import compute_dtype

_run = partial(jax.jit, static_argnames=("config", "backend"))(
    lambda params, config, batch, backend: backbone(params, config, batch, None, backend=backend)[0]
)


@dataclass(frozen=True)
class LayerError:
    """Of the residual stream after a layer, against a reference."""

    layer: int  # from 1; 0 is the embedding
    snr_db: float  # 10 log10(|reference|^2 / |difference|^2), inf where equal
    largest: float  # absolute activation of the model
    channel: int  # where it is
    largest_reference: float


def residuals(model: Model, tokens: Sequence[int], *, backend: str | None = None) -> Iterator[jax.Array]:
    """[T, E] of one sequence i32[T]: the embedding, then the residual stream after each layer, one at a time.

    A layer runs as a model of its own, whose embedding is the stream so far and whose tokens are 0 .. T - 1: the same
    compiled function for all layers of one attention window, in time linear in their number.
    """
    ids = np.asarray(tokens)
    size = model.config.vocab_size
    if ids.ndim != 1 or not ids.size or not np.issubdtype(ids.dtype, np.integer):
        raise EvaluationError(f"tokens must be a list of token ids, at least one, not {ids.dtype}{list(ids.shape)}")
    if ids.min() < 0 or ids.max() >= size:
        raise EvaluationError(f"token ids must be in [0, {size}), the model's vocabulary")
    rows = jnp.arange(len(ids), dtype=jnp.int32)
    batch = Packed(jnp.asarray(ids, jnp.int32), rows, jnp.zeros_like(rows))
    x = _run(replace(model.params, layers=()), model.config, batch, backend)
    yield x
    batch = replace(batch, tokens=rows)
    for i, layer in enumerate(model.params.layers):
        config = replace(model.config, num_layers=1, windows=model.config.windows[i : i + 1])
        x = _run(replace(model.params, embed=x, head=None, layers=(layer,)), config, batch, backend)
        yield x


def compare_layers(
    model: Model, reference: Model, tokens: Sequence[int], *, backend: str | None = None
) -> tuple[LayerError, ...]:
    """L + 1 entries. Raises EvaluationError for models of different shapes."""
    a, b = ((m.config.vocab_size, m.config.num_layers, m.config.hidden_size) for m in (model, reference))
    if a != b:
        raise EvaluationError(f"the models must have the same vocabulary, layers and width, not {a} and {b}")
    pairs = zip(residuals(model, tokens, backend=backend), residuals(reference, tokens, backend=backend), strict=True)
    return tuple(_error(i, *jax.device_get(_compare(x, y))) for i, (x, y) in enumerate(pairs))


@jax.jit
def _compare(x: jax.Array, reference: jax.Array) -> tuple[jax.Array, ...]:
    """Squared norms of the reference and of the difference; x's largest entry of each channel; the reference's."""
    dtype = compute_dtype(reference.dtype)
    x, y = x.astype(dtype), reference.astype(dtype)
    return jnp.sum(y * y), jnp.sum((x - y) ** 2), jnp.abs(x).max(axis=0), jnp.abs(y).max()


def _error(layer: int, signal: np.ndarray, noise: np.ndarray, largest: np.ndarray, reference: np.ndarray) -> LayerError:
    snr = math.inf if noise == 0 else 10 * math.log10(float(signal) / float(noise)) if signal > 0 else -math.inf
    channel = int(largest.argmax())
    return LayerError(layer, snr, float(largest[channel]), channel, float(reference))
