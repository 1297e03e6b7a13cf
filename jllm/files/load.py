"""Loads a model: config, weights and tokenizer together."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from jllm.config import LlamaConfig
from jllm.errors import ConfigError, TokenizerError
from jllm.files.find import count_layers, find_model, stored_tensors
from jllm.files.gguf.reader import is_gguf
from jllm.files.gguf.tokenizer import has_tokenizer
from jllm.files.hf_config import load_config
from jllm.files.load_params import load_params
from jllm.files.tokenizer import Tokenizer, load_tokenizer
from jllm.model.model import Model
from jllm.parallel.memory import Memory
from jllm.parallel.mesh import free_of, make_mesh, spread
from jllm.quant.rotation import quantize_model
from jllm.quant.schemes import PLAIN, PRESETS, Scheme, find_scheme

BUNDLED = Path(__file__).parents[1] / "assets" / "fairytale"
DTYPES = {"bf16": "bfloat16", "f16": "float16", "f32": "float32"}


class Head(NamedTuple):
    """Holds what a model needs to check requests and make texts."""

    config: LlamaConfig
    tokenizer: Tokenizer | None


def load(
    path: str | Path = BUNDLED,
    *,
    dtype=None,
    quantize: str | Path | Scheme | None = None,
    mesh: Mesh | int | None = None,
    activation_parts: int = 1,
    expert_parallel: bool | None = None,
    memory: Memory | None = None,
    eos_token_ids: Sequence[int] | None = None,
) -> Model:
    """Loads a Hugging Face directory or Hub id, or a GGUF file; without a path, the bundled model.

    dtype (a jax dtype or its name) is the dtype of the weights. None means as stored. But a CPU has no 16-bit
    arithmetic, so there None widens 16-bit weights to float32.

    quantize is a scheme (jllm.quant.schemes): a preset's name, a .toml or .json file, or a Scheme. The preset "bf16" is
    a dtype. Weights are quantized one by one as they are read. A scheme that rotates them (`w4a16-g64+rotate-all`)
    needs all weights first, which takes twice their room.

    A directory without a tokenizer gives a model that takes and yields token ids. eos_token_ids replace all end tokens
    that the files name.

    mesh shards the model over devices: a jax.sharding.Mesh with the axis "model", or a number of devices. Each weight
    is sharded as it is read. A device holds its shards and at most one whole weight. If the scheme rotates, it holds at
    most a whole layer, or embedding and head. activation_parts quantizes activations on one device as a mesh of that
    many devices does. Raises ConfigError for a mesh that does not fit the model.

    On a mesh each device has some of a mixture's experts if their number divides, else some columns of each expert.
    expert_parallel=True or False asks for one of the two.

    Raises NoRoomError, before any weight is read, for weights that take more than memory() bytes. Its message names
    changes that would fit. The default of memory asks the device.
    """
    scheme = None if quantize is None else find_scheme(quantize)
    wanted = _dtype(dtype, scheme)
    folder = find_model(path)
    config, tokenizer = load_head(folder, eos_token_ids=eos_token_ids)
    config = replace(config, activation_parts=activation_parts, expert_parallel=expert_parallel)
    if mesh is None and expert_parallel is not None:
        raise ConfigError(f"expert_parallel={expert_parallel} says how devices share experts: give a mesh (--devices)")
    if wanted is None:
        wanted = jnp.dtype(config.dtype)
        if jax.default_backend() == "cpu" and wanted.itemsize < 4:
            wanted = jnp.dtype("float32")
    if mesh is not None:
        config = spread(config, make_mesh(mesh) if isinstance(mesh, int) else mesh)
    free = memory() if memory else free_of(config.mesh)
    rotated = scheme is not None and scheme.rotate is not None
    params = load_params(folder, config, wanted, None if rotated else scheme, free)
    model = Model(config, params, tokenizer)
    return quantize_model(model, scheme, donate=True) if scheme is not None and rotated else model


def load_head(path: str | Path = BUNDLED, *, eos_token_ids: Sequence[int] | None = None) -> Head:
    """Loads a model's config and tokenizer without its weights, and uses no device."""
    folder = find_model(path)
    config = load_config(folder, stored_layers=count_layers(stored_tensors(folder)))
    if eos_token_ids is not None:
        config = replace(config, eos_ids=_checked_ids(eos_token_ids, config.vocab_size))
    try:
        tokenizer = load_tokenizer(folder)
    except TokenizerError:
        files = any((folder / name).exists() for name in ("tokenizer.model", "tokenizer.json"))
        if files or (is_gguf(folder) and has_tokenizer(folder)):
            raise
        tokenizer = None
    if eos_token_ids is not None and tokenizer is not None:
        tokenizer = replace(tokenizer, eos_ids=config.eos_ids)
    return Head(config, tokenizer)


def _checked_ids(ids: Sequence[int], vocab_size: int) -> tuple[int, ...]:
    if isinstance(ids, int) or not all(type(id) is int and 0 <= id < vocab_size for id in ids):
        raise ConfigError(f"eos_token_ids must be token ids in [0, {vocab_size}), the model's vocabulary, not {ids!r}")
    return tuple(ids)


def _dtype(dtype, scheme: Scheme | None) -> jnp.dtype | None:
    """Returns the dtype that the arguments ask for; None leaves it to the checkpoint."""
    is_dtype = scheme == PRESETS[PLAIN]  # a file of rules may also have the name bf16
    if dtype is None:
        return jnp.dtype("bfloat16") if is_dtype else None
    try:
        wanted = jnp.dtype(DTYPES.get(dtype, dtype) if isinstance(dtype, str) else dtype)
    except TypeError:
        raise ConfigError(f"dtype {dtype!r} is not known; known are {', '.join(DTYPES)}") from None
    if is_dtype and wanted.name != "bfloat16":
        raise ConfigError(f"quantize='bf16' and dtype={wanted.name!r} contradict each other")
    return wanted
