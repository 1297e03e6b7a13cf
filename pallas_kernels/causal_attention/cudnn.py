"""Runs causal_attention by cuDNN, as jax.nn has it: no [T, T] logits are kept, and gradients are cuDNN's own."""

from functools import partial

import jax
import jax.numpy as jnp

from pallas_kernels.backends import capability

DTYPES = (jnp.bfloat16, jnp.float16)


def check(num_tokens: int, head_dim: int, dtype: jnp.dtype, window: int | None, plain: bool) -> None:
    """Raises NotImplementedError for what it does not run. `plain`: there are neither softcap nor sinks."""
    if not plain:
        raise NotImplementedError("softcap and sinks are not supported by backend cudnn")
    if int(capability().partition(".")[0] or 0) < 8:
        raise NotImplementedError("backend cudnn is for GPUs of compute capability 8.0 and later")
    if dtype not in DTYPES:
        raise NotImplementedError(f"{dtype} is not supported by backend cudnn, which does bfloat16 and float16")
    if num_tokens % 2 or head_dim % 8 or head_dim > 128 or window is not None:
        raise NotImplementedError(
            f"T={num_tokens} D={head_dim} window={window} is not supported by backend cudnn, which does even T,"
            " multiples of 8 up to 128 and no window"
        )


@partial(jax.jit, static_argnames=("scale", "window"))
def causal_attention(
    q: jax.Array, k: jax.Array, v: jax.Array, segments: jax.Array, scale: float, window: int | None
) -> jax.Array:
    """Returns [T, H, D] of q [T, H, D], k, v [T, K, D] and segments i32[T]; see api.py."""
    num_tokens, num_heads, _ = q.shape
    # With an axis of heads, since JAX's rule for vmap takes no other masks; a model's layers share it.
    mask = jnp.broadcast_to(segments[:, None] == segments[None, :], (1, num_heads, num_tokens, num_tokens))
    with jax.numpy_dtype_promotion("standard"):  # as jax.nn has it
        return jax.nn.dot_product_attention(
            q[None], k[None], v[None], mask=mask, scale=scale, is_causal=True, implementation="cudnn"
        )[0]
