"""Checks whether a model can be served with an engine's options, by its weights and devices."""

from functools import partial

import jax

from jllm.config import LlamaConfig
from jllm.engine.options import EngineOptions
from jllm.errors import ConfigError, EvaluationError
from jllm.model.linear import linear
from jllm.model.params import HEAD, Params, linears
from jllm.model.taps import EXPERTS, SEEN, resolve_taps, tap_numbers
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
    if options.taps:
        _check_taps(options, config)


def _check_taps(options: EngineOptions, config: LlamaConfig) -> None:
    """Raises ConfigError for taps that the model lacks, and for those whose steps round otherwise than steps without
    them where no step may."""
    try:
        names = resolve_taps(options.taps or (), config.num_layers)
        for name in names:
            tap_numbers(name, config)
            _check_kind(name, config)
    except EvaluationError as error:
        raise ConfigError(f"taps: {error}") from None
    inner = [name for name in names if name.startswith("layers.") and name.rpartition(".")[2] not in SEEN]
    if options.deterministic and inner:
        seams = ", ".join(f"layers.*.{name}" for name in SEEN)
        raise ConfigError(f"taps: a step that keeps {inner[0]} may round otherwise, and deterministic takes {seams}")


def _check_kind(name: str, config: LlamaConfig) -> None:
    """Raises EvaluationError for a value that a layer's kind of MLP lacks."""
    layer, value = name.removeprefix("layers.").partition(".")[::2]
    if type(config) is not LlamaConfig or not value:  # other configs have layers of their own
        return
    if value in (("gate_up", "silu_mul") if config.has_experts(int(layer)) else EXPERTS):
        raise EvaluationError(f"tap {name}: this kind of layer has no such value")


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
