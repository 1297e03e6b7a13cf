"""Scales learned by gradient: layer by layer while weights are rounded, or end to end of weights that are quantized
already. The optimizer is optax's (the extra `learn`)."""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from tqdm import tqdm

from jllm.config import LlamaConfig
from jllm.errors import QuantizationError, how_to_install
from jllm.model import Packed, packed_logits
from jllm.params import LayerParams, Params, matrices, with_matrices
from jllm.pretrained import Model
from jllm.quant.calibration.inputs import (
    DELAY,
    check_tokens,
    collect,
    embed_tokens,
    formats_of_layer,
    plan,
    round_rest,
    run_layer,
)
from jllm.quant.quantize import weight_formats
from jllm.quant.schemes import Scheme
from pallas_kernels.numerics import compute_dtype
from pallas_kernels.quantized_weights import QuantizedWeight, encode_with, grouped
from pallas_kernels.weight_codes import code_values, fit_scales, round_codes, storable
from pallas_kernels.weight_formats import WeightFormat

Thetas = dict[str, jax.Array]  # field -> [N', groups], logarithm of what multiplies a scale
RANGES = {"int8": (-127, 127), "int4": (-8, 7), "nf4": (-1, 1), "fp4": (-1, 1), "fp8": (-448, 448)}  # of code values


def learned(
    model: Model,
    scheme: str | Scheme,
    tokens: Any,
    *,
    steps: int = 100,
    rate: float = 3e-3,
    batch: int = 4,
    seed: int = 0,
) -> Params:
    """Params quantized by `scheme` with scales that Adam moved, `steps` steps a layer, so that the layer's outputs on
    what reaches it through the quantized layers come near those of the unquantized model.

    Rounding passes gradients straight through, and a scale's gradient is LSQ's (Esser et al., arXiv 1902.08153); layer
    by layer as OmniQuant (arXiv 2308.13137). `tokens` are i32[B, T], of which a step takes `batch` rows, drawn by
    `seed`. Inputs of eight bits are not rounded meanwhile; zero points stay. Rate 0 or no steps give plain rounding.
    """
    if steps < 0 or batch < 1 or rate < 0:
        raise QuantizationError(f"steps and rate must be at least 0 and batch 1, not {steps}, {rate} and {batch}")
    formats = plan(model, scheme)
    for name, wanted_formats in formats.items():
        if blocks := [fmt.name for fmt in wanted_formats if fmt.scale_codes is not None]:
            raise QuantizationError(f"{name}: scales of {blocks[0]} cannot be learned: they are not any number")
    ids = check_tokens(model, tokens)
    x = wanted = embed_tokens(model, ids)
    rng, layers = np.random.default_rng(seed), []
    for i, layer in enumerate(tqdm(model.params.layers, "learning", delay=DELAY, leave=False, disable=None)):
        config, chosen = model.config.one_layer(i), formats_of_layer(layer, i, formats)
        wanted = collect(layer, wanted, config, ())[0]
        rows = jnp.asarray(rng.integers(len(ids), size=(steps, min(batch, len(ids)))), jnp.int32)
        fixed = {"config": config, "chosen": tuple(chosen.items()), "rate": rate}
        layer = with_matrices(layer, _quantized(layer, chosen, _train_layer(layer, x, wanted, rows, **fixed)))
        x = collect(layer, x, config, ())[0]
        layers.append(layer)
    return round_rest(replace(model.params, layers=tuple(layers)), formats)


@partial(jax.jit, static_argnames=("config", "chosen", "rate"))
def _train_layer(
    layer: LayerParams,
    x: jax.Array,
    wanted: jax.Array,
    rows: jax.Array,
    *,
    config: LlamaConfig,
    chosen: tuple[tuple[str, WeightFormat], ...],
    rate: float,
) -> Thetas:
    """The thetas after steps on rows i32[steps, batch] of x and wanted [B, T, E]."""
    weights = matrices(layer)
    scales = {field: fit_scales(grouped(weights[field], fmt), fmt) for field, fmt in chosen}
    size = jnp.mean(jnp.square(wanted))

    def loss(thetas: Thetas, chosen_rows: jax.Array) -> jax.Array:
        fields = {field: fake_quantize(weights[field], scales[field], thetas[field], fmt) for field, fmt in chosen}
        run = partial(run_layer, with_matrices(layer, fields), config=config)
        got = jax.vmap(lambda row: run(row)[0])(x[chosen_rows])
        return jnp.mean(jnp.square(got - wanted[chosen_rows])) / size

    return _descend(loss, {field: jnp.zeros_like(scales[field][0]) for field, _ in chosen}, rows, rate)


def _descend(loss: Callable[[Any, jax.Array], jax.Array], start: Any, batches: jax.Array, rate: float) -> Any:
    """Gives what Adam with a cosine schedule ends at, after one step for each of `batches` [steps, ...]."""
    optax = load_optax("learned scales")
    optimizer = optax.adam(optax.cosine_decay_schedule(rate, max(1, len(batches))))

    def step(carry: tuple[Any, Any], batch: jax.Array) -> tuple[tuple[Any, Any], jax.Array]:
        thetas, state = carry
        value, gradient = jax.value_and_grad(loss)(thetas, batch)
        with jax.numpy_dtype_promotion("standard"):  # optax raises floats to integer powers
            updates, state = optimizer.update(gradient, state, thetas)
        return (optax.apply_updates(thetas, updates), state), value

    return jax.lax.scan(step, (start, optimizer.init(start)), batches)[0][0]


def fake_quantize(
    w: jax.Array, fitted: tuple[jax.Array, jax.Array | None], theta: jax.Array, fmt: WeightFormat
) -> jax.Array:
    """What w [N, K] becomes with the fitted scales times exp(theta), differentiable with respect to theta: rounding
    passes gradients straight through, clipping doesn't."""
    x, (scales, zeros) = grouped(w, fmt), fitted
    s = scales * jnp.exp(theta)
    s = (s + jax.lax.stop_gradient(storable(s, fmt) - s))[..., None]
    z = None if zeros is None else zeros[..., None]
    low, high = RANGES[fmt.codes]
    if z is not None:  # all codes are in use
        low, high = (-8, 7) if fmt.packed else (-128, 127)
    shift = jnp.zeros((), x.dtype) if z is None else z
    u = jnp.clip(x / s, low - shift, high - shift)
    values = code_values(round_codes(x / s, z, fmt), z, fmt, x.dtype)
    y = (u + jax.lax.stop_gradient(values - u)) * s
    return y.reshape(y.shape[0], -1)[: w.shape[0], : w.shape[1]].astype(w.dtype)


@partial(jax.jit, static_argnames="fmt")
def _encode_scaled(w: jax.Array, theta: jax.Array, fmt: WeightFormat) -> QuantizedWeight:
    scales, zeros = fit_scales(grouped(w, fmt), fmt)
    return encode_with(w, storable(scales * jnp.exp(theta), fmt), zeros, fmt)


def _quantized(layer: LayerParams, chosen: dict[str, WeightFormat], thetas: Thetas) -> dict[str, QuantizedWeight]:
    weights = matrices(layer)
    return {field: _encode_scaled(weights[field], thetas[field], fmt) for field, fmt in chosen.items()}


def tune_scales(
    model: Model,
    params: Params,
    tokens: Any,
    *,
    steps: int = 100,
    rate: float = 1e-3,
    batch: int = 4,
    seed: int = 0,
) -> Params:
    """`params`, quantized by whatever method from `model`, with their scales tuned end to end: Adam on the divergence
    (Kullback and Leibler's, nats a token) from `model` on calibration tokens i32[B, T]. Codes stay as they are.

    The gradient is that through the products that serve, on plain jnp: rounded inputs pass it straight through. It
    takes both models and the activations of `batch` rows at once. Scales that are quantized themselves stay.
    """
    if steps < 0 or batch < 1 or rate < 0:
        raise QuantizationError(f"steps and rate must be at least 0 and batch 1, not {steps}, {rate} and {batch}")
    if not weight_formats(params):
        raise QuantizationError("no weight is quantized: there are no scales to tune")
    ids = check_tokens(model, tokens)
    drawn = np.random.default_rng(seed).integers(len(ids), size=(steps, min(batch, len(ids))))
    leaves, tree = jax.tree.flatten(params, is_leaf=lambda leaf: isinstance(leaf, QuantizedWeight))
    thetas = _tune(tuple(leaves), model.params, jnp.asarray(ids[drawn]), config=model.config, tree=tree, rate=rate)
    return jax.tree.unflatten(tree, [_scaled(leaf, theta, store=True) for leaf, theta in zip(leaves, thetas)])


@partial(jax.jit, static_argnames=("config", "tree", "rate"))
def _tune(
    leaves: tuple[Any, ...], reference: Params, tokens: jax.Array, *, config: LlamaConfig, tree: Any, rate: float
) -> list[jax.Array | None]:
    """A theta for each leaf that has one, on tokens i32[steps, batch, T]."""
    T = tokens.shape[-1]
    positions = jnp.arange(T, dtype=jnp.int32)

    def logits(params: Params, row: jax.Array) -> jax.Array:
        return packed_logits(params, config, Packed(row, positions, jnp.zeros_like(row)))

    def loss(thetas: list[jax.Array | None], rows: jax.Array) -> jax.Array:
        params = jax.tree.unflatten(tree, [_scaled(leaf, theta) for leaf, theta in zip(leaves, thetas)])
        return jax.vmap(lambda row: divergence(logits(reference, row), logits(params, row)))(rows).mean()

    start = [
        jnp.zeros(leaf.scales.shape, compute_dtype(leaf.scales.dtype)) if _tunable(leaf) else None for leaf in leaves
    ]
    return _descend(loss, start, tokens, rate)


def _tunable(leaf: Any) -> bool:
    return isinstance(leaf, QuantizedWeight) and leaf.format.scale_codes is None and not leaf.format.double_quant


def _scaled(leaf: Any, theta: jax.Array | None, *, store: bool = False) -> Any:
    """A weight with its scales times exp(theta), wide, or as they are stored."""
    if theta is None:
        return leaf
    scales = leaf.scales.astype(theta.dtype) * jnp.exp(theta)
    return replace(leaf, scales=storable(scales, leaf.format).astype(leaf.scales.dtype) if store else scales)


def divergence(wanted: jax.Array, found: jax.Array) -> jax.Array:
    """Kullback and Leibler's, of logits [T, V] from those wanted: nats a token."""
    p, q = jax.nn.log_softmax(wanted), jax.nn.log_softmax(found)
    return jnp.sum(jnp.exp(p) * (p - q), axis=-1).mean()


def load_optax(what: str) -> Any:
    try:
        import optax
    except ModuleNotFoundError:
        raise QuantizationError(f"{what} need optax: {how_to_install('learn')}") from None
    return optax
