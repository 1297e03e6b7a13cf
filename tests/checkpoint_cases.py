"""What the checkpoint tests share: a small model, random params, and a way to change what a file holds."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import safetensors.numpy

from jllm.config import LlamaConfig
from jllm.files.save import save
from jllm.model.param_specs import abstract_params

WEIGHTS, INDEX = "model.safetensors", "model.safetensors.index.json"


def make_config(**changes):
    config = LlamaConfig(
        architecture="LlamaForCausalLM",
        vocab_size=24,
        hidden_size=16,
        intermediate_size=20,
        num_layers=2,
        num_heads=4,
        num_kv_heads=2,
        head_dim=6,
        context=32,
        dtype="float32",
        bos_id=1,
        eos_ids=(2, 3),
    )
    return dataclasses.replace(config, **changes)


def random_params(config, dtype="float32"):
    """Params without a single zero or one, so that swapped or unread rows show."""
    leaves, tree = jax.tree.flatten(abstract_params(config, dtype))
    rng = np.random.default_rng(0)
    return jax.tree.unflatten(tree, [jnp.asarray(rng.standard_normal(s.shape), s.dtype) for s in leaves])


def assert_same_bits(one, other):
    assert str(jax.tree.structure(one)) == str(jax.tree.structure(other))
    for a, b in zip(jax.tree.leaves(one), jax.tree.leaves(other)):
        assert (a.dtype, a.shape) == (b.dtype, b.shape)
        assert np.asarray(a).tobytes() == np.asarray(b).tobytes()


def rewrite(path, change):
    tensors = safetensors.numpy.load_file(path)
    change(tensors)
    safetensors.numpy.save_file(tensors, path)


def save_both_ways(path):
    """Under `path`, a directory with one safetensors file and one with the same in shards; returns the config."""
    config = make_config()
    save(path / "one", random_params(config), config)
    save(path / "many", random_params(config), config, max_shard_bytes=4000)
    return config
