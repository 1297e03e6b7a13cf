"""Plants outliers like those of large LLaMAs into a small model, without changing its function. Quantization then
suffers as it does in large models.

Large models have three known kinds. First, a few channels of linear layers' inputs are larger than the rest by a factor
of tens. They are the same for all tokens and layers (Dettmers et al., arXiv 2208.07339). Second, the first token's
residual stream is massive in one or two channels from an early layer on (Sun et al., arXiv 2402.17762). Third, a few
channels of each head's K are larger for all tokens (KIVI, arXiv 2402.02750).

The first kind lies in norm weights or in the residual stream. In the stream, only a rotation of all channels spreads
them again (QuaRot, arXiv 2404.00456).
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import jax.numpy as jnp
import numpy as np

from jllm.analysis.activations import residuals
from jllm.errors import QuantizationError
from jllm.model.model import Model
from jllm.model.params import AttentionParams, LayerParams, MLPParams, Params, matrices
from jllm.quant.calibration.migration import migrate, scale_keys
from jllm.quant.quantize import weight_formats
from pallas_kernels.formats.numerics import compute_dtype


def plant(
    model: Model,
    *,
    channels: int = 4,
    strength: float = 32.0,
    gated: int = 4,
    kv: int = 0,
    massive: bool = True,
    first_token: int | None = None,
    stream: np.ndarray | None = None,
    seed: int = 0,
) -> Model:
    """Returns a model of the same function with planted outliers. Each kind can be left out.

    channels: number of residual channels to enlarge, drawn by `seed` and shared by all layers. They become `strength`
    times as large where projections read them after a norm.

    gated: number of input channels of each down projection to enlarge.

    kv: number of channels of each head's K and V to enlarge. Channels of K come in pairs that rotary embedding turns;
    queries shrink by the same factor.

    massive: concentrate the contribution of `first_token` (None: BOS, or the first EOS) in the first drawn channel. The
    stream is turned, so the outlier is as massive as the model makes it.

    stream: tokens i32[B, T]; replaces `massive`. The stream is turned so that the main directions of these tokens, over
    all layers, become the drawn channels. With channels = 0, only norm weights move into the matrices that read them.

    strength: a power of two, so that scaling is exact in every dtype. Turning is exact up to rounding, and unties the
    head of a tied model.

    Raises QuantizationError for quantized models, for other kinds of layers, and for values out of range.
    """
    c = model.config
    if quantized := weight_formats(model.params):
        raise QuantizationError(f"{next(iter(quantized))} is quantized: outliers can be planted into wide weights only")
    for part in (part for layer in model.params.layers for part in (layer.attention, layer.mlp)):
        if not isinstance(part, AttentionParams | MLPParams):
            raise QuantizationError(f"{type(part).__name__}: outliers cannot be planted into this kind of layer")
    check_strength(strength)
    sizes = (("channels", channels, c.hidden_size), ("gated", gated, c.intermediate_size), ("kv", kv, c.head_dim))
    for name, count, size in sizes:
        if not 0 <= count <= size:
            raise QuantizationError(f"{name} must be in 0 .. {size}, not {count}")
    rng = np.random.default_rng(seed)
    drawn = rng.permutation(c.hidden_size)[: max(channels, 1)]
    if massive and stream is not None:
        raise QuantizationError("the residual stream is turned one way: give either massive or stream")
    if massive:
        model = _turn(model, _first_direction(model, first_token), drawn[:1])
    if stream is not None:
        model = _turn(model, _main_directions(model, stream, channels), drawn[:channels])
    if kv % 2:
        raise QuantizationError(f"kv must be even, not {kv}: rotary embedding turns channels of K in pairs")
    gates = [rng.permutation(c.intermediate_size)[:gated] for _ in range(c.num_layers)]
    layers = tuple(
        _scale(model, layer, drawn[:channels], gate, strength) for layer, gate in zip(model.params.layers, gates)
    )
    if kv:
        pairs = np.arange(c.head_dim // 2) < kv // 2
        s = np.where(rng.permuted(np.tile(pairs, (c.num_layers, c.num_kv_heads, 1)), axis=2), strength, 1.0)
        layers = tuple(_scale_heads(model, layer, of_layer) for layer, of_layer in zip(layers, s))
    return replace(model, params=replace(model.params, layers=layers))


def check_strength(strength: float) -> None:
    """Raises QuantizationError unless strength is a power of two, at least 1."""
    if not (strength >= 1 and np.log2(strength).is_integer()):
        raise QuantizationError(f"strength must be 1, 2, 4, 8, ..: a power of two keeps the function, not {strength}")


def _scale(model: Model, layer: LayerParams, channels: np.ndarray, gate: np.ndarray, strength: float) -> LayerParams:
    """Returns the layer with larger chosen inputs of linear layers, and smaller weights to match."""
    for field, chosen in (("qkv", channels), ("gate_up", channels), ("down", gate)):
        s = jnp.ones(matrices(layer)[field].shape[1], compute_dtype(model.params.dtype))
        layer = migrate(layer, model.config, field, s.at[chosen].set(1 / strength))
    return layer


def _scale_heads(model: Model, layer: LayerParams, s: np.ndarray) -> LayerParams:
    """Returns the layer with K and V times s [K, D / 2] for both channels of a pair. Weights that read them shrink."""
    c = model.config
    if getattr(layer.attention, "q_norm", None) is not None:
        raise QuantizationError("heads: a norm of each head's K and Q undoes what is planted before it")
    both = jnp.asarray(np.concatenate([s, s], axis=1), compute_dtype(model.params.dtype))
    layer = migrate(layer, c, "o", jnp.repeat(1 / both, c.num_heads // c.num_kv_heads, axis=0).reshape(-1))
    return scale_keys(layer, c, both)


def _first_direction(model: Model, first_token: int | None) -> np.ndarray:
    """Returns f64[1, E]: the direction of the first token's stream after half of the layers."""
    c = model.config
    token = c.bos_id if first_token is None else first_token
    token = next(iter(model.eos_ids), None) if token is None else token
    if token is None:
        raise QuantizationError("the model has neither BOS nor EOS to begin a text with: give first_token")
    middle = np.asarray(list(residuals(model, [token]))[(c.num_layers + 1) // 2], np.float64)
    return middle / np.linalg.norm(middle)


def _main_directions(model: Model, tokens: np.ndarray, count: int) -> np.ndarray:
    """Returns f64[count, E]: orthonormal directions with most of the stream's energy. Every token and layer counts
    alike, as norms make them equally large."""
    energy = np.zeros((model.config.hidden_size,) * 2)
    for x in (np.asarray(x, np.float64) for row in tokens for x in residuals(model, row)):
        x = x / np.linalg.norm(x, axis=1, keepdims=True)
        energy += x.T @ x
    return np.linalg.eigh(energy)[1].T[::-1][:count]


def _turn(model: Model, directions: np.ndarray, channels: np.ndarray) -> Model:
    """Returns the model with its stream turned so that orthonormal directions [n, E] become channels. Norm weights move
    into the matrices that read them. Householder reflections then commute with norms, and move into the weights on both
    sides."""
    p, c = model.params, model.config
    wide = np.promote_types(np.dtype(p.dtype), np.float32)
    mirrors: list[np.ndarray] = []
    for direction, channel in zip(directions, channels):
        mirror = _reflect(direction, mirrors)  # earlier mirrors leave earlier channels in place
        mirror[channel] -= 1.0
        mirrors.append(mirror / (np.linalg.norm(mirror) or 1))  # a direction that already lies there is not turned

    def reads(w: Any, norm: Any) -> Any:
        turned = _reflect(np.asarray(w, np.float64) * np.asarray(norm, np.float64)[None, :], mirrors)
        return jnp.asarray(turned.astype(wide)).astype(w.dtype)

    def writes(w: Any) -> Any:
        if w is None:
            return None
        return jnp.asarray(_reflect(np.asarray(w, np.float64).T, mirrors).astype(wide)).T.astype(w.dtype)

    one = jnp.ones_like(p.norm)
    layers = tuple(
        LayerParams(
            replace(
                layer.attention,
                norm=one,
                qkv=reads(layer.attention.qkv, layer.attention.norm),
                o=writes(layer.attention.o),
                o_bias=writes(layer.attention.o_bias),
            ),
            replace(
                layer.mlp,
                norm=one,
                gate_up=reads(layer.mlp.gate_up, layer.mlp.norm),
                down=writes(layer.mlp.down),
                down_bias=writes(layer.mlp.down_bias),
            ),
        )
        for layer in p.layers
    )
    embed, head = reads(p.embed, one), reads(p.embed if p.head is None else p.head, p.norm)
    turned = Params(embed=embed, layers=layers, norm=one, head=head)
    return replace(model, params=turned, config=replace(c, tie_embeddings=False))


def _reflect(x: np.ndarray, mirrors: Sequence[np.ndarray]) -> np.ndarray:
    """Returns the rows of x [.., E] after all reflections in turn."""
    for mirror in mirrors:
        x = x - 2 * (x @ mirror)[..., None] * mirror
    return x.copy()
