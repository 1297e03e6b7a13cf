"""Removes and restores the copies of KV heads on several ranks, for models with fewer KV heads than ranks.

Caches of one device and snapshots have each head once.
"""

from typing import Any

import jax
import numpy as np

from jllm.config import LlamaConfig
from jllm.model.cache import Cache
from jllm.parallel.mesh import stored_kv_heads


def distinct(cache: Cache, config: LlamaConfig) -> Cache:
    """Returns the cache of a mesh with each KV head once: [N, K, ...]."""
    copies = stored_kv_heads(config) // config.num_kv_heads
    return cache if copies == 1 else jax.tree.map(lambda x: x[:, ::copies], cache)


def repeated(cache: Any, config: LlamaConfig) -> Any:
    """Returns a cache on the host with each KV head as often as the mesh has it: the inverse of distinct."""
    copies = stored_kv_heads(config) // config.num_kv_heads
    return cache if copies == 1 else jax.tree.map(lambda x: np.repeat(x, copies, axis=1), cache)
