"""Checks whether a model can be served with an engine's options, by its weights and devices."""

from functools import partial

import jax

from jllm.config import LlamaConfig
from jllm.engine.options import EngineOptions
from jllm.errors import ConfigError
from jllm.model.linear import linear
from jllm.model.params import HEAD, Params, linears
from jllm.parallel.mesh import has_processes
from pallas_kernels.backends import DETERMINISTIC
from pallas_kernels.formats.quantized_weights import QuantizedWeight


def check_model(params: Params, config: LlamaConfig, options: EngineOptions) -> None:
    """Raises ConfigError for options that this model cannot be served with."""
    if options.kernels == DETERMINISTIC:
        _check_one_order(params, config)
    if options.compile_processes and config.mesh is not None:
        raise ConfigError(
            "compile_processes trace steps of one device, and this model is sharded over several: leave them out"
        )
    if has_processes(config):
        _check_alike(options)


def _check_alike(options: EngineOptions) -> None:
    """Raises ConfigError for options that each of several processes sharing a model would decide differently."""
    if options.num_pages is None:
        raise ConfigError("processes share this model, and each would see other free memory: give num_pages")
    if options.speculate is not None and options.drafts is None:
        raise ConfigError("processes share this model, and each would time drafts by its own clock: give drafts")


def _check_one_order(params: Params, config: LlamaConfig) -> None:
    """Raises ConfigError for a weight with one scale for all rows of a step. Raises it also for a weight without a
    deterministic matmul here."""
    seen, stacked = set(), config.mesh is not None
    for name, w in [*linears(params).items(), (HEAD, params.embed if params.head is None else params.head)]:
        if isinstance(w, QuantizedWeight) and w.format.per_tensor and w.input_scale is None:
            raise ConfigError(
                f"{name} takes activations with one scale for all tokens of a step, and deterministic=True none: "
                "quantize it with a scale a token, as w8a8 does"
            )
        of = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape[stacked:], leaf.dtype), w)  # one rank's
        if (key := (jax.tree.structure(of), *jax.tree.leaves(of))) in seen:
            continue
        seen.add(key)
        row = jax.ShapeDtypeStruct((1, of.shape[1]), params.dtype)
        try:
            jax.eval_shape(partial(linear, backend=DETERMINISTIC), row, of)
        except NotImplementedError as error:
            raise ConfigError(f"deterministic=True has no matmul for {name}: {error}") from None
