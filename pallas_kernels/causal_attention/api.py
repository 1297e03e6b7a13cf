"""Computes causal attention of segments of one flat token axis, without a cache; for training."""

import jax

from pallas_kernels.backends import TRAINING, Backend, choose
from pallas_kernels.causal_attention import cudnn, xla
from pallas_kernels.checks import (
    bind_shapes,
    check_floats,
    check_heads,
    check_int32,
    check_logits,
    check_window,
)


def causal_attention(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    segments: jax.Array,
    *,
    scale: float,
    window: int | None = None,
    softcap: float | None = None,
    sinks: jax.Array | None = None,
    backend: str | None = None,
) -> jax.Array:
    """Returns softmax(scale * q k^T) v within equal segments, causal by row order: [T, H, D].

    Takes q [T, H, D] and k, v [T, K, D]. Key j is visible to query i iff segments[i] == segments[j] (i32[T]) and 0 <= i
    - j < window. `softcap` and `sinks` are as in decode_attention. It is differentiable, and works under vmap. Raises
    ValueError where shapes or dtypes disagree.
    """
    sizes = bind_shapes(q=(q, "T H D"), k=(k, "T K D"), v=(v, "T K D"), segments=(segments, "T"))
    check_floats(q=q, k=k, v=v)
    check_int32(segments=segments)
    check_heads(sizes["H"], sizes["K"])
    check_window(window)
    logits = check_logits(softcap, sinks, sizes["H"])
    chosen = choose(BACKENDS, backend, sizes["T"], sizes["D"], q.dtype, window, not logits)
    return chosen.run(q, k, v, segments, scale, window, **logits)


BACKENDS = {
    "cudnn": Backend(cudnn.causal_attention, cudnn.check, unasked_on=(TRAINING,)),
    "xla": Backend(xla.causal_attention),
}
