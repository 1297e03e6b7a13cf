"""A model as people hold it: config, weights and tokenizer together."""

from collections import Counter
from dataclasses import dataclass
from pathlib import Path

import jax
import jax.numpy as jnp

from jllm.checkpoint import find_model, load_params
from jllm.config import LlamaConfig, load_config
from jllm.errors import ConfigError, TokenizerError
from jllm.params import Params
from jllm.tokenizer import Tokenizer, load_tokenizer

BUNDLED = Path(__file__).parent / "assets" / "fairytale"
DTYPES = {"bf16": "bfloat16", "f16": "float16", "f32": "float32"}


@dataclass(frozen=True)
class Model:
    """What load returns. A plain value: pass params to model.forward, or the whole to generate and Engine."""

    config: LlamaConfig
    params: Params
    tokenizer: Tokenizer | None = None

    def memory_footprint(self) -> dict[str, int]:
        """Bytes of weights by dtype, and their "total"."""
        sizes: Counter[str] = Counter()
        for leaf in jax.tree.leaves(self.params):
            sizes[leaf.dtype.name] += leaf.size * leaf.dtype.itemsize
        return {**sizes, "total": sum(sizes.values())}


def load(path: str | Path = BUNDLED, *, dtype=None, quantize: str | None = None) -> Model:
    """Loads a Hugging Face directory or Hub id; without a path, the bundled model.

    dtype (a jax dtype or its name) is that of the weights; None means as stored, except that on a CPU, which has no
    16-bit arithmetic, 16-bit weights are widened to float32. quantize names a scheme: "bf16" so far, which is a dtype.
    A directory without a tokenizer gives a model that takes and yields token ids.
    """
    dtype = _dtype(dtype, quantize)
    folder = find_model(path)
    config = load_config(folder)
    if dtype is None:
        dtype = jnp.dtype(config.dtype)
        if jax.default_backend() == "cpu" and dtype.itemsize < 4:
            dtype = jnp.dtype("float32")
    params = load_params(folder, config, dtype)
    try:
        tokenizer = load_tokenizer(folder)
    except TokenizerError:
        if any((folder / name).exists() for name in ("tokenizer.model", "tokenizer.json")):
            raise
        tokenizer = None
    return Model(config, params, tokenizer)


def _dtype(dtype, quantize: str | None) -> jnp.dtype | None:
    """The dtype that the arguments ask for, None if that is left to the checkpoint."""
    if quantize is not None and quantize != "bf16":
        raise ConfigError(f"quantization scheme {quantize!r} is not supported; supported so far: bf16")
    if dtype is None:
        return None if quantize is None else jnp.dtype("bfloat16")
    try:
        wanted = jnp.dtype(DTYPES.get(dtype, dtype) if isinstance(dtype, str) else dtype)
    except TypeError:
        raise ConfigError(f"dtype {dtype!r} is not known; known are {', '.join(DTYPES)}") from None
    if quantize is not None and wanted.name != "bfloat16":
        raise ConfigError(f"quantize='bf16' and dtype={wanted.name!r} contradict each other")
    return wanted
