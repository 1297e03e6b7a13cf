"""Folds rotations into weights (QuaRot, Ashkboos et al., arXiv 2404.00456). The model's function stays. Outlier
channels of quantized values are spread over all channels.

"kv" rotates the values of each head by a Hadamard matrix. It rotates the rows of the value projection, and rotates back
in the columns of the output projection. "all" also rotates the residual stream, by random signs and a Hadamard matrix.
Weights of norms then move into the weights that read them, since a norm must commute with the rotation. A tied model
gets a head of its own.

Two rotations remain for the running model. K after rotary embedding is rotated by its KV format (`int4-g32-h`). The
down projection's input is rotated by a weight format (`mxfp4-h`).
"""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np
from numpy.typing import ArrayLike

from jllm.errors import QuantizationError
from jllm.model.param_specs import param_specs
from jllm.model.params import AttentionParams, LayerParams, MLPParams, Params
from jllm.model.shards import share, whole
from jllm.quant.quantize import quantize, weight_formats
from jllm.quant.schemes import ROTATIONS, Scheme, find_scheme
from pallas_kernels.formats.hadamard import turn
from pallas_kernels.formats.numerics import compute_dtype

if TYPE_CHECKING:
    from jllm.model.model import Model


def quantize_model(model: "Model", scheme: "str | Scheme", *, donate: bool = False) -> "Model":
    """Returns the model rotated by the scheme, and then rounded by quantize. Leaves may be jax.ShapeDtypeStruct. Raises
    QuantizationError as these do."""
    scheme = find_scheme(scheme)
    turned = model if scheme.rotate is None else rotate(model, scheme.rotate)
    params = quantize(turned.params, replace(scheme, rotate=None), donate=donate, config=turned.config)
    return replace(turned, params=params)


def rotate(model: "Model", which: str, *, seed: int = 0) -> "Model":
    """Returns a model of the same function, exact up to rounding to its dtype. `which` is "kv" or "all". `seed` draws
    the signs. Leaves may be jax.ShapeDtypeStruct. On a mesh each device holds one whole layer at a time. Raises
    QuantizationError for quantized models, and for layers of other kinds."""
    if which not in ROTATIONS:
        raise QuantizationError(f"rotate must be one of {', '.join(ROTATIONS)}, not {which!r}")
    check_rotates(model)
    c = model.config
    return _turned(model, hadamard_signs(c.hidden_size, seed) if which == "all" else None)


def hadamard_signs(size: int, seed: int) -> np.ndarray:
    return np.random.default_rng(seed).choice((-1.0, 1.0), size)


def check_rotates(model: "Model") -> None:
    """Raises QuantizationError for a model that cannot be rotated."""
    if quantized := weight_formats(model.params):
        raise QuantizationError(f"{next(iter(quantized))} is quantized: only wide weights can be rotated")
    for part in (part for layer in model.params.layers for part in (layer.attention, layer.mlp)):
        if not isinstance(part, AttentionParams | MLPParams):
            raise QuantizationError(f"{type(part).__name__}: this kind of layer cannot be rotated")


def _turned(model: "Model", signs: ArrayLike | None) -> "Model":
    """Rotates each layer's heads, and the stream by signs f64[E] and a Hadamard matrix (None: it stays)."""
    c, p = model.config, model.params
    abstract = isinstance(p.embed, jax.ShapeDtypeStruct)
    one = partial(_rotate_layer, kv_heads=c.num_kv_heads, head_dim=c.head_dim)
    specs = param_specs(replace(c, tie_embeddings=p.head is None))
    untied = param_specs(replace(c, tie_embeddings=False))

    def run(function: Callable, part: Any, spec: Any, turned: Any, *by: Any) -> Any:
        """Returns function(part, *by). `spec` are the specs of this part of the params, `turned` those of the
        result."""
        make = partial(jax.eval_shape, function) if abstract else function
        if c.mesh is None:
            return make(part, *by)
        part = jax.tree.map(lambda of, leaf: whole(leaf, of.entry, c, of.shape), spec, part)
        return jax.tree.map(lambda of, leaf: share(leaf, of.entry, c), turned, make(part, *by))

    layers = tuple(run(one, p.layers[i], spec, spec, signs) for i, spec in enumerate(specs.layers))
    if signs is None:
        return replace(model, params=replace(p, layers=layers))
    ends = (replace(of, layers=()) for of in (p, specs, untied))
    turned = run(_rotate_ends, *ends, signs)
    return replace(model, params=replace(turned, layers=layers), config=replace(c, tie_embeddings=False))


@partial(jax.jit, static_argnames=("kv_heads", "head_dim"))
def _rotate_layer(layer: LayerParams, signs: ArrayLike | None, *, kv_heads: int, head_dim: int) -> LayerParams:
    attention, mlp = layer.attention, layer.mlp
    rows = kv_heads * head_dim

    def values(w: jax.Array | None) -> jax.Array | None:
        """Returns w [(H + 2K) D, ...] with the rows of values rotated head by head."""
        if w is None:
            return None
        last = _wide(w[-rows:]).reshape(kv_heads, head_dim, -1)
        turned = turn(last.swapaxes(1, 2)).swapaxes(1, 2).reshape(rows, *w.shape[1:])
        return w.at[-rows:].set(turned.astype(w.dtype))

    o = turn(_wide(attention.o).reshape(attention.o.shape[0], -1, head_dim)).reshape(attention.o.shape)
    qkv, qkv_bias, o = values(attention.qkv), values(attention.qkv_bias), o.astype(attention.o.dtype)
    attention = replace(attention, qkv=qkv, qkv_bias=qkv_bias, o=o)
    if signs is None:
        return LayerParams(attention, mlp)
    attention = replace(
        attention,
        norm=jnp.ones_like(attention.norm),
        qkv=_reads(attention.qkv, attention.norm, signs),
        o=_writes(attention.o, signs),
        o_bias=_writes(attention.o_bias, signs),
    )
    mlp = replace(
        mlp,
        norm=jnp.ones_like(mlp.norm),
        gate_up=_reads(mlp.gate_up, mlp.norm, signs),
        down=_writes(mlp.down, signs),
        down_bias=_writes(mlp.down_bias, signs),
    )
    return LayerParams(attention, mlp)


@jax.jit
def _rotate_ends(p: Params, signs: ArrayLike) -> Params:
    one = jnp.ones_like(p.norm)
    head = p.embed if p.head is None else p.head
    return replace(p, embed=_reads(p.embed, one, signs), head=_reads(head, p.norm, signs), norm=one)


def _reads(w: Any, norm: jax.Array, signs: ArrayLike) -> jax.Array:
    """Returns w [N, E] that reads the rotated stream after a norm. Rows of an embedding are the stream itself."""
    wide = _wide(w)
    return _times(wide * norm.astype(wide.dtype)[None, :], signs).astype(w.dtype)


def _writes(w: Any, signs: ArrayLike) -> Any:
    """Returns w [E, K], or a bias [E], that adds to the rotated stream."""
    return None if w is None else _times(_wide(w).T, signs).T.astype(w.dtype)


def _times(x: jax.Array, signs: ArrayLike) -> jax.Array:
    """Returns x [..., n] times signs [n] and then a Hadamard matrix."""
    return turn(x * jnp.asarray(signs).astype(x.dtype).reshape((1,) * (x.ndim - 1) + (-1,)))


def _wide(w: Any) -> jax.Array:
    return w.astype(compute_dtype(w.dtype))
