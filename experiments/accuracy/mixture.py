"""Measures what rounding costs in each part of a Mixture of Experts, and how much of that comes from other routes.

Part "mixture" rounds the experts, the attention or the routers of all layers to so many bits. An expert that computes
every token is one of the experts. A group of GROUP inputs shares a scale. `kl` is the divergence from the model as
loaded, in nats per token. `kl_replayed` is the same if tokens go to the experts that they have in the model as loaded.
`routes` is the share of chosen experts that are others than in the model as loaded. Intervals are of the bootstrap over
windows. There is no cache.
"""

import re
from collections.abc import Iterator, Mapping
from dataclasses import replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from experiments.accuracy.rows import Row, rounded
from jllm.analysis.scoring import score_rows
from jllm.config import LlamaConfig
from jllm.model.backbone import tapped_backbone
from jllm.model.hooks import HookRows, make_edits
from jllm.model.model import Model
from jllm.model.paged import Packed
from jllm.model.params import Params, map_linears

GROUP = 32
PARTS: Mapping[str, str] = {  # what the names of weights match
    "experts": r".*\.mlp\.(experts|shared_expert)\..*",
    "attention": r".*\.self_attn\..*",
    "router": r".*\.mlp\.(gate|router)",
}
Routes = dict[str, jax.Array]  # i32[T, k] by the tap's name


def mixture_rows(model: Model, windows: np.ndarray, module: str, bits: int) -> Iterator[Row]:
    """Yields the row of one of PARTS in so many bits, over windows i32[W, T]."""
    changed = replace(model, params=rounded_part(model.params, module, bits))
    found = [of_window(changed, model, jnp.asarray(window)) for window in windows]
    row: Row = {"part": "mixture", "module": module, "bits": bits, "tokens": windows.size, "windows": len(windows)}
    for name in ("kl", "kl_replayed", "routes"):
        value, interval = with_interval(np.asarray([each[name] for each in found]))
        row |= {name: rounded(value), f"{name}_95": [rounded(x) for x in interval]}
    yield row


def rounded_part(params: Params, module: str, bits: int) -> Params:
    """Returns params with one of PARTS rounded."""

    def convert(name: str, w: Any) -> Any:
        return round_groups(w, bits) if re.fullmatch(PARTS[module], name) else w

    return map_linears(convert, params)


@partial(jax.jit, static_argnames="bits")
def round_groups(w: jax.Array, bits: int) -> jax.Array:
    """Returns w [N, K] rounded to 2^bits values for each group of inputs, which lie evenly around 0. A group's largest
    value stays."""
    half = 2 ** (bits - 1)
    x = jnp.pad(w.astype(jnp.float32), ((0, 0), (0, -w.shape[1] % GROUP))).reshape(w.shape[0], -1, GROUP)
    scale = jnp.max(jnp.abs(x), axis=2, keepdims=True) / (half - 0.5)
    codes = jnp.clip(jnp.floor(x / jnp.where(scale == 0, 1, scale)) + 0.5, 0.5 - half, half - 0.5)
    return (codes * scale).reshape(w.shape[0], -1)[:, : w.shape[1]].astype(w.dtype)


def of_window(model: Model, reference: Model, tokens: jax.Array) -> dict[str, float]:
    """Returns the means over the tokens i32[T] of a window."""
    config = reference.config
    wanted, routes = routed(reference.params, tokens, {}, config=config)
    own, others = routed(model.params, tokens, {}, config=config)
    replayed, _ = routed(model.params, tokens, routes, config=config)
    found = {}
    for name, hidden in (("kl", own), ("kl_replayed", replayed)):
        heads = model.params, reference.params
        scores = score_rows(heads, (hidden, wanted), jnp.zeros_like(tokens), configs=(config, config), backend=None)
        found[name] = float(np.asarray(scores["kl"], np.float64).mean())
    kept = [(others[name][:, :, None] == routes[name][:, None, :]).any(axis=2).mean() for name in routes]
    return found | {"routes": 1 - float(np.mean(kept))}


@partial(jax.jit, static_argnames="config")
def routed(params: Params, tokens: jax.Array, routes: Routes, *, config: LlamaConfig) -> tuple[jax.Array, Routes]:
    """Returns the hidden states [T, E], and each layer's routes. Those that are given replace the layers' own."""
    position = jnp.arange(tokens.shape[0], dtype=jnp.int32)
    given = {name: jax.tree_util.Partial(lambda routes, value, rows: routes, each) for name, each in routes.items()}
    edits = make_edits(given, config.num_layers, HookRows(position, position, tokens))
    names = tuple(f"layers.{i}.routes" for i in range(config.num_layers) if config.has_experts(i))
    batch = Packed(tokens, position, jnp.zeros_like(position))
    hidden, _, found = tapped_backbone(params, config, batch, None, names, edits=edits)
    return hidden, found


def with_interval(values: np.ndarray, samples: int = 1000) -> tuple[float, list[float]]:
    """Returns the mean of values [W], and its 95 % interval by the bootstrap (Efron, 1979)."""
    drawn = np.random.default_rng(0).integers(len(values), size=(samples, len(values)))
    return float(values.mean()), np.quantile(values[drawn].mean(axis=1), [0.025, 0.975]).tolist()
