"""Measures the damage of each layer's quantization alone. One layer at a time has quantized weights."""

from collections.abc import Sequence
from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np

from jllm.analysis.activations import residuals
from jllm.analysis.scoring import score_rows
from jllm.config import LlamaConfig
from jllm.errors import EvaluationError
from jllm.model.backbone import Packed, backbone
from jllm.model.model import Model
from jllm.model.params import LayerParams, Params


def divergence_by_layer(
    model: Model, reference: Model, tokens: Sequence[int], *, backend: str | None = None
) -> np.ndarray:
    """Returns f[L]: the divergence from the reference, in nats per token, if only layer i is the model's.

    It is the mean Kullback-Leibler divergence of next-token distributions, over the tokens i32[T] of one sequence,
    without a cache. Embedding and head are the reference's. So is the stream before layer i; a sequence takes L (L + 3)
    / 2 + L layers. Raises EvaluationError for models of different shapes.
    """
    c = reference.config
    a, b = ((m.config.vocab_size, m.config.num_layers, m.config.hidden_size) for m in (model, reference))
    if a != b:
        raise EvaluationError(f"the models must have the same vocabulary, layers and width, not {a} and {b}")
    streams = list(residuals(reference, tokens, backend=backend))
    head = replace(reference.params, layers=())
    found = []
    for i, layer in enumerate(model.params.layers):
        x = _through(layer, head, streams[i], config=c.one_layer(i), backend=backend)
        for j in range(i + 1, c.num_layers):
            x = _through(reference.params.layers[j], head, x, config=c.one_layer(j), backend=backend)
        ignored = jnp.zeros(x.shape[0], jnp.int32)
        scores = score_rows((head, head), (x, streams[-1]), ignored, configs=(c, c), backend=backend)
        found.append(np.asarray(scores["kl"], np.float64).mean())
    return np.asarray(found)


@partial(jax.jit, static_argnames=("config", "backend"))
def _through(layer: LayerParams, top: Params, x: jax.Array, *, config: LlamaConfig, backend: str | None) -> jax.Array:
    """Returns the stream [T, E] after a layer. It runs as a one-layer model whose embedding is the stream before."""
    rows = jnp.arange(x.shape[0], dtype=jnp.int32)
    params = replace(top, embed=x, head=None, layers=(layer,))
    return backbone(params, config, Packed(rows, rows, jnp.zeros_like(rows)), None, backend=backend)[0]
