"""SpinQuant (Liu et al., arXiv 2405.16406): rotations of the residual stream and of heads (its R1 and R2), learned by
gradient so that the rounded model strays least. They are folded into weights; none takes a product as the model runs.

A step keeps matrices orthonormal: Cayley SGD (Li et al., arXiv 2002.01113), here an optimizer of optax's kind.
"""

from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jllm.errors import QuantizationError
from jllm.model import Packed, packed_logits
from jllm.params import HEAD, Params, Weight, layer_prefix, matrices, matrix_entries
from jllm.pretrained import Model
from jllm.quant.calibration.inputs import check_tokens, plan
from jllm.quant.calibration.scale_learning import divergence, load_optax
from jllm.quant.quantize import map_weights
from jllm.quant.rotation import Rotation, check_rotates, hadamard_rotation, rotate_by
from jllm.quant.schemes import Formats, Scheme, choose_format
from jllm.weight_inputs import rounded_inputs
from pallas_kernels.numerics import compute_dtype
from pallas_kernels.quantized_weights import decode, encode, rotate_groups
from pallas_kernels.weight_formats import WeightFormat


def learn_rotation(
    model: Model,
    scheme: str | Scheme,
    tokens: Any,
    *,
    steps: int = 100,
    rate: float = 1.5,
    batch: int = 4,
    seed: int = 0,
) -> Rotation:
    """Matrices for rotation.rotate_by, of float64 and orthonormal to its last digits: from hadamard_rotation(model,
    seed=seed) by steps of Cayley SGD, without momentum and with a rate that falls to 0 along a line, as the paper does.

    The loss is the divergence (nats a token) of the model that is rotated and rounded by `scheme` from the model as it
    is, on calibration tokens i32[B, T], of which a step takes `batch` rows, drawn by `seed`. Weights and inputs are
    rounded as serving rounds them; gradients go through rounding and, unlike the paper's, through scales (`passing`).
    It takes both models in float32 at least and the activations of `batch` rows at once. No steps or rate 0 give the
    Hadamard rotation. Raises QuantizationError for models that cannot be rotated, and without optax.
    """
    if steps < 0 or batch < 1 or rate < 0:
        raise QuantizationError(f"steps and rate must be at least 0 and batch 1, not {steps}, {rate} and {batch}")
    check_rotates(model)
    formats = plan(model, scheme)
    ids = check_tokens(model, tokens)
    drawn = np.random.default_rng(seed).integers(len(ids), size=(steps, min(batch, len(ids))))
    dtype = compute_dtype(model.params.dtype)
    start = jax.tree.map(partial(jnp.asarray, dtype=dtype), hadamard_rotation(model, seed=seed))
    wide = jax.tree.map(lambda leaf: leaf.astype(dtype), model.params)
    fixed = {"config": model.config, "formats": tuple(formats.items()), "rate": rate}
    return jax.tree.map(nearest_orthonormal, _train(start, wide, jnp.asarray(ids[drawn]), **fixed))


@partial(jax.jit, static_argnames=("config", "formats", "rate"))
def _train(
    start: Rotation, params: Params, tokens: jax.Array, *, config: Any, formats: tuple[tuple[str, Formats], ...], rate
) -> Rotation:
    """The rotation after a step for each of tokens i32[steps, batch, T]."""
    optax = load_optax("learned rotations")
    model, chosen = Model(config, params, None), dict(formats)
    optimizer = cayley_sgd(optax.linear_schedule(rate, 0.0, max(1, len(tokens))))

    def loss(rotation: Rotation, rows: jax.Array) -> jax.Array:
        turned = rotate_by(model, rotation)
        rounded = map_weights(_rounded, turned.params, chosen)
        edits = _edits(turned.params, chosen)

        def logprobs(row: jax.Array) -> tuple[jax.Array, jax.Array]:
            whole = Packed(row, jnp.arange(len(row), dtype=jnp.int32), jnp.zeros_like(row))
            found = packed_logits(rounded, turned.config, whole, edits)
            return packed_logits(params, config, whole), found

        return jax.vmap(lambda row: divergence(*logprobs(row)))(rows).mean()

    def step(carry: tuple[Any, Any], rows: jax.Array) -> tuple[tuple[Any, Any], None]:
        rotation, state = carry
        updates, state = optimizer.update(jax.grad(loss)(rotation, rows), state, rotation)
        return (optax.apply_updates(rotation, updates), state), None

    return jax.lax.scan(step, (start, optimizer.init(start)), tokens)[0][0]


def _rounded(name: str, w: Any, wanted: Formats) -> Weight:
    """w [N, K] as it will be stored, in its own dtype."""
    if not wanted:
        return w
    fmt = choose_format(name, w.shape, wanted)
    return passing(w, lambda x, fmt: decode(encode(x, fmt), w.dtype), fmt, fmt.group)


def passing(x: jax.Array, rounding: Any, fmt: WeightFormat, block: int | None) -> jax.Array:
    """rounding(x [.., K], fmt), with a gradient: that of x, and that errors grow with scales, which are the largest
    magnitudes of a block (None: of a row) times a constant. So they are LSQ's (Esser et al., arXiv 1902.08153)."""
    x, plain = rotate_groups(x, fmt), replace(fmt, rotated=False)
    fixed = jax.lax.stop_gradient(x)
    errors = (rounding(fixed, plain) - fixed).reshape(*x.shape[:-1], -1, block or x.shape[-1])
    largest = jnp.abs(x.reshape(errors.shape)).max(axis=-1, keepdims=True)
    unit = jnp.maximum(jax.lax.stop_gradient(largest), jnp.finfo(x.dtype).tiny)
    return rotate_groups(x + (errors * (largest / unit)).reshape(x.shape), fmt)


def _edits(params: Params, formats: dict[str, Formats]) -> dict[str, Any]:
    """Rounding of what linear layers read, by the name of its tap."""
    reads = {
        f"layers.{i}.{entry.reads}": (f"{layer_prefix(i)}{entry.name}", matrices(layer)[field])
        for i, layer in enumerate(params.layers)
        for field, entry in matrix_entries(layer).items()
    } | {"norm": (HEAD, params.head)}
    found = {}
    for tap, (name, w) in reads.items():
        if formats.get(name):
            found[tap] = partial(_edit, choose_format(name, w.shape, formats[name]))
    return found


def _edit(fmt: WeightFormat, value: jax.Array, rows: Any) -> jax.Array:
    if fmt.activations is None:
        return value
    return passing(value, rounded_inputs, fmt, None if fmt.row_codes else fmt.group)


class CayleyState(NamedTuple):
    steps: jax.Array  # i32, that were done
    velocity: Any  # as the parameters are


def cayley_sgd(rate: Any, momentum: float = 0.0) -> Any:
    """An optax.GradientTransformation for parameters that are orthonormal matrices [.., n, n], which they stay but for
    rounding. `rate` is a schedule, from a count of steps to a number.

    With gradient G at X, M = momentum M - G and W = (M X^T - X M^T) / 2, a step goes to (I - a/2 W)^-1 (I + a/2 W) X,
    Cayley's transform, and M becomes W X. The size a is the rate, at most 1 / |W| (largest sum of a column), as in the
    authors' code; they iterate where this solves.
    """
    optax = load_optax("learned rotations")

    def init(params: Any) -> CayleyState:
        return CayleyState(jnp.zeros((), jnp.int32), jax.tree.map(jnp.zeros_like, params))

    def update(gradients: Any, state: CayleyState, params: Any = None) -> tuple[Any, CayleyState]:
        found = jax.tree.map(partial(_cayley_step, rate(state.steps), momentum), gradients, state.velocity, params)
        moved, velocity = jax.tree.transpose(jax.tree.structure(params), jax.tree.structure((0, 0)), found)
        return moved, CayleyState(state.steps + 1, velocity)

    return optax.GradientTransformation(init, update)


def _cayley_step(
    rate: Any, momentum: float, gradient: jax.Array, velocity: jax.Array, x: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """What is added to x, and the next velocity."""
    matmul = partial(jnp.matmul, precision="highest")
    m = momentum * velocity - gradient
    product = matmul(m, x.mT)
    w = (product - product.mT) / 2
    size = jnp.abs(w).sum(axis=-2, keepdims=True).max(axis=-1, keepdims=True)
    half = jnp.minimum(jnp.asarray(rate, x.dtype), 1 / jnp.maximum(size, jnp.finfo(x.dtype).tiny)) / 2
    one = jnp.broadcast_to(jnp.eye(x.shape[-1], dtype=x.dtype), x.shape)
    return jnp.linalg.solve(one - half * w, matmul(one + half * w, x)) - x, matmul(w, x)


def nearest_orthonormal(x: Any) -> np.ndarray:
    """The orthonormal matrices nearest to x [.., n, n], float64: what float32 has lost over many steps comes back."""
    u, _, v = np.linalg.svd(np.asarray(x, np.float64))
    return u @ v
