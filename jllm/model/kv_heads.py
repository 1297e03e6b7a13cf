"""KV heads that several ranks keep alike, where a model has fewer of them than ranks: K and V with each head once, as
caches of one device and snapshots have them, and back."""

from typing import Any

import jax
import numpy as np

from jllm.config import LlamaConfig
from jllm.model.cache import Cache
from jllm.parallel.mesh import stored_kv_heads


def distinct(cache: Cache, config: LlamaConfig) -> Cache:
    """Returns the cache of a mesh, with each KV head once: [N, K, ...]."""
    copies = stored_kv_heads(config) // config.num_kv_heads
    return cache if copies == 1 else jax.tree.map(lambda x: x[:, ::copies], cache)


def repeated(cache: Any, config: LlamaConfig) -> Any:
    """Returns the reverse of distinct, for a cache on the host."""
    copies = stored_kv_heads(config) // config.num_kv_heads
    return cache if copies == 1 else jax.tree.map(lambda x: np.repeat(x, copies, axis=1), cache)
