"""Computes log-probabilities of given tokens as a deterministic engine serves them, with a gradient.

The forward pass is the engine's: each sequence is one prompt chunk over a paged cache, and head and log-softmax run on
the same tiles of rows as in a step. The backward pass goes through the layers from the last to the first. Each layer
is differentiated without a cache, at the input that it had in the forward pass. Activations, K and V are rounded as
they were there, and the rounding passes gradients straight through (Bengio et al., arXiv 1308.3432). The gradient of a
quantized weight is that of the weight from which it was made. An adapter is served in a place of its own, as an
engine has it. Its gradient is that of plain products. Experts compute the backward pass of the tokens that they
computed in the forward pass.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NoReturn

import jax
import jax.numpy as jnp
import numpy as np

from jllm.config import LlamaConfig
from jllm.errors import ConfigError, EvaluationError, QuantizationError
from jllm.model.adapted import Slots
from jllm.model.adapters import (
    MOST_RANK,
    Adapter,
    LowRank,
    all_targets,
    arrays_of,
    check_adapter,
    choose_targets,
    layer_with,
)
from jllm.model.backbone import head, run_layers, tapped_backbone
from jllm.model.cache import KVCache, make_cache, parse_kv_cache
from jllm.model.hooks import Edits, HookRows, make_edits
from jllm.model.linear import decoded, embed
from jllm.model.norms import norm_rows
from jllm.model.paged import PAGE_SIZE, Chunks, Packed, no_segments, paged_batch
from jllm.model.param_specs import param_dtype
from jllm.model.params import (
    EMBED,
    HEAD,
    LayerParams,
    Params,
    Weight,
    layer_prefix,
    matrices,
    matrix_entries,
    with_matrices,
)
from jllm.model.sampling import token_entropies
from jllm.model.sampling import token_logprobs as logprobs_of
from jllm.model.weight_inputs import rounded_inputs
from jllm.quant.quantize import check_shapes, formats_by_weight, map_weights
from jllm.quant.schemes import Formats, Scheme, choose_format
from pallas_kernels.backends import DETERMINISTIC, DIFFERENTIABLE, TRAINING
from pallas_kernels.formats.kv_formats import Kivi, KVFormat
from pallas_kernels.formats.numerics import compute_dtype
from pallas_kernels.formats.quantized_weights import QuantizedWeight, encode
from pallas_kernels.formats.rounding import round_to
from pallas_kernels.head_logprobs import head_logprobs
from pallas_kernels.one_order import fenced, in_tiles
from pallas_kernels.tiled_attention import check_page_size

HEAD_ROWS = 128  # rows of logits in memory at once
ONCE = "token_logprobs is differentiable once, backward: second derivatives and jvp are not there"

Scored = tuple[jax.Array, jax.Array]  # log-probabilities [B, L] and entropies [B, L]
Routes = dict[str, jax.Array]  # by the tap's name, layers.I.routes: i32[B, L, k]


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Kept:
    """Holds what a forward pass leaves for the backward pass."""

    inputs: tuple[jax.Array, ...]  # of each layer, [B L, E]
    routes: Routes  # of each layer with experts
    hidden: jax.Array  # the input of the head, [B L, E]


@dataclass(frozen=True)
class Served:
    """Describes the engine whose log-probabilities are computed."""

    config: LlamaConfig
    dtype: np.dtype
    page_size: int
    stored: tuple[KVFormat, KVFormat]
    formats: tuple[tuple[str, Formats], ...]  # of each weight that is quantized here, by name
    backend: str | None
    tempered: bool
    entropy: bool
    rank: int | None = None  # of the engine's places for adapters; None: it has none
    targets: tuple[str, ...] | None = None  # the modules that its adapters may change


def token_logprobs(
    params: Params,
    config: LlamaConfig,
    tokens: jax.Array,
    lengths: jax.Array,
    *,
    page_size: int = PAGE_SIZE,
    dtype: Any = None,
    quantize: str | Scheme | None = None,
    kv_cache: KVCache | None = None,
    temperature: float | jax.Array | None = None,
    entropy: bool = False,
    deterministic: bool = True,
    adapters: Adapter | None = None,
    adapter_rank: int | None = None,
    adapter_targets: tuple[str, ...] | None = None,
    routes: Mapping[str, jax.Array] | None = None,
) -> jax.Array | tuple[jax.Array, jax.Array]:
    """Returns float32 [B, L] (float64 in that dtype). Entry [b, t] is the log-probability of tokens[b, t + 1] after
    tokens[b, : t + 1]. It is 0, with no gradient, from lengths[b] - 1 on. A length beyond L counts as L.

    Takes tokens i32[B, L] and lengths i32[B]. With `deterministic` the values have the bits of an engine with
    these options. It may have drawn the tokens, recomputed or scored them. Engine.token_logprobs_options() gives an
    engine's options. `params` are cast to `dtype` (default: theirs), then quantized by the scheme `quantize`. Gradients
    have the dtypes of `params`. With a temperature the values are those of logits / temperature
    (logprobs_mode="tempered"). With `entropy` it returns the entropies [B, L] too.

    With `adapters`, a pytree as init_adapter returns it, all sequences take that adapter. The engine's places for it
    have adapter_rank (default: its own) and adapter_targets.

    `routes` replaces the experts that a router chooses, as an engine's taps have them: layers.I.routes -> i32[B, L, k],
    where -1 is no expert. Layers that it does not name choose their own. The shares are those of these weights.

    It is differentiable once, by params and adapters: under jit, grad and remat. Raises EvaluationError under vmap and
    jvp, for second derivatives, and for derivatives by temperature. Raises ConfigError for options that no engine has,
    and QuantizationError for a scheme that does not fit.
    """
    if config.mesh is not None:
        raise ConfigError("token_logprobs computes on one device: give a config without a mesh")
    tokens, lengths = jnp.asarray(tokens), jnp.asarray(lengths)  # lists too
    if tokens.ndim != 2 or lengths.shape != tokens.shape[:1]:
        raise ValueError(f"tokens have shape {tokens.shape} and lengths {lengths.shape}, expected [B, L] and [B]")
    for name, ints in (("tokens", tokens), ("lengths", lengths)):
        if not jnp.issubdtype(ints.dtype, jnp.integer):
            raise ValueError(f"{name} are {ints.dtype}, expected int32")
    kind = param_dtype(config, params.dtype if dtype is None else dtype)
    stored = parse_kv_cache(kv_cache, config, kind)
    if isinstance(stored[0], Kivi):
        raise ConfigError(f"token_logprobs has no KV format {stored[0].name}, whose newest tokens are in no page")
    try:
        check_page_size(page_size)
    except NotImplementedError as refusal:
        raise ConfigError(str(refusal)) from None
    formats = {} if quantize is None else _formats(params, quantize, deterministic)
    how = Served(
        config=config,
        dtype=kind,
        page_size=page_size,
        stored=stored,
        formats=tuple(formats.items()),
        backend=DETERMINISTIC if deterministic else None,
        tempered=temperature is not None,
        entropy=entropy,
        rank=_rank(config, adapters, adapter_rank, adapter_targets),
        targets=None if adapter_targets is None else tuple(adapter_targets),
    )
    if jnp.ndim(0.0 if temperature is None else temperature):
        raise ConfigError("temperature must be one number for all sequences: call once for each temperature")
    if temperature is not None and not isinstance(temperature, jax.core.Tracer) and not temperature > 0:
        raise ConfigError(f"temperature must be above 0, not {temperature}")
    wide = compute_dtype(kind)
    if 0 in tokens.shape:
        nothing = jnp.zeros(tokens.shape, wide)
        return (nothing, nothing) if entropy else nothing
    # Through float32, in which an engine keeps it.
    heat = _constant(jnp.asarray(1.0 if temperature is None else temperature, jnp.float32).astype(wide))
    given = {} if routes is None else {name: jnp.asarray(each) for name, each in routes.items()}
    _check_routes(given, config, tokens.shape)
    *ints, given = jax.tree.map(lambda x: jnp.asarray(x, jnp.int32), (tokens, lengths, given))
    try:
        logprobs, entropies = _jitted(how, params, adapters, *ints, given, heat)
    except TypeError as error:  # JAX's own, which names no function
        if "forward-mode" not in str(error):
            raise
        raise EvaluationError(ONCE) from None
    return (logprobs, entropies) if entropy else logprobs


def _check_routes(routes: Routes, config: LlamaConfig, shape: tuple[int, ...]) -> None:
    """Raises ConfigError for routes of layers without experts, and ValueError for those of another shape or dtype."""
    names = [f"layers.{i}.routes" for i in range(config.num_layers) if config.has_experts(i)]
    for name, each in routes.items():
        if name not in names or config.experts is None:
            raise ConfigError(f"routes of {name!r}: the model has {', '.join(names) or 'no experts'}")
        if each.shape != (want := (*shape, config.experts.chosen)):
            raise ValueError(f"routes of {name} have shape {each.shape}, expected {want}")
        if not jnp.issubdtype(each.dtype, jnp.integer):
            raise ValueError(f"routes of {name} are {each.dtype}, expected int32")


def _rank(
    config: LlamaConfig, adapter: Adapter | None, rank: int | None, targets: tuple[str, ...] | None
) -> int | None:
    """Returns the rank of the engine's places for adapters, or None. Raises ConfigError and WeightsError for arguments
    that do not fit."""
    if adapter is None:
        return rank
    known = choose_targets(config, targets)
    check_adapter(adapter, known, MOST_RANK if rank is None else rank, "the adapter")
    return max((each.rank for each in adapter.values()), default=1) if rank is None else rank


def _formats(params: Params, quantize: str | Scheme, deterministic: bool) -> dict[str, Formats]:
    """Returns the one format of each weight that the scheme quantizes, and none for others that it names."""
    wanted = formats_by_weight(params, quantize)
    check_shapes(params, wanted)
    found: dict[str, Formats] = {}

    def choose(name: str, leaf: Weight, some: Formats) -> Weight:
        if some and isinstance(leaf, QuantizedWeight):
            raise QuantizationError(f"{name} is quantized already ({leaf.format.name}): leave quantize out")
        found[name] = (choose_format(name, leaf.shape, some),) if some else ()
        if some and deterministic and found[name][0].per_tensor:
            raise ConfigError(f"{name} takes activations with one scale for all tokens, and deterministic=True none")
        return leaf

    map_weights(choose, params, wanted)
    return {name: found[name] for name in wanted}


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _scored(
    how: Served,
    params: Params,
    adapter: Adapter | None,
    tokens: jax.Array,
    lengths: jax.Array,
    routes: Routes,
    temperature: jax.Array,
) -> Scored:
    return _forward(how, params, adapter, tokens, lengths, routes, temperature)[0]


_jitted = partial(jax.jit, static_argnums=0)(_scored)


def _forward(
    how: Served,
    params: Params,
    adapter: Adapter | None,
    tokens: jax.Array,
    lengths: jax.Array,
    routes: Routes,
    temperature: jax.Array,
    keep: bool = False,
) -> tuple[Scored, Kept | None]:
    """Returns the engine's log-probabilities, and what the backward pass keeps."""
    params, adapter, tokens, lengths, routes, temperature = _alone(
        (params, adapter, tokens, lengths, routes, temperature)
    )
    served = replace(_served(how, params), adapters=_in_a_place(how, adapter))
    served = jax.lax.optimization_barrier(served)  # else XLA may leave out how these are rounded
    (B, L), config = tokens.shape, how.config
    M = -(-L // how.page_size)
    table = jnp.arange(B * M, dtype=jnp.int32).reshape(B, M)
    chunks = Chunks(tokens.reshape(-1), jnp.zeros(B, jnp.int32), jnp.full(B, L, jnp.int32), table)
    batch = paged_batch(no_segments(M), chunks, num_pages=B * M, page_size=how.page_size)
    if how.rank is not None:
        batch = replace(batch, adapter=jnp.full(B * L, -1 if adapter is None else 0, jnp.int32))
    cache = make_cache(config, B * M, how.page_size, how.stored)
    taps = tuple(f"layers.{i}.input" for i in range(config.num_layers)) if keep else ()
    chosen = tuple(f"layers.{i}.routes" for i in range(config.num_layers) if keep and config.has_experts(i))
    edits = _replay({name: each.reshape(B * L, -1) for name, each in routes.items()}, B * L, config.num_layers)
    how_run: dict[str, Any] = {"backend": how.backend, "edits": edits}
    hidden, _, found = tapped_backbone(served, config, batch, cache, taps + chosen, **how_run)

    def score(logits: jax.Array, tokens: jax.Array, temperature: jax.Array) -> Scored:
        if how.tempered:
            logits = logits / temperature[:, None]
        logprobs = logprobs_of(logits, tokens, backend=how.backend)
        return logprobs, token_entropies(logits) if how.entropy else jnp.zeros_like(logprobs)

    def rows(hidden: jax.Array, tokens: jax.Array, temperature: jax.Array) -> Scored:
        return fenced(how.backend, score, head(served, config, hidden, backend=how.backend), tokens, temperature)

    inputs = hidden, _targets(tokens), jnp.full(B * L, temperature)
    logprobs, entropies = in_tiles(rows, *inputs, size=min(HEAD_ROWS, -(-B * L // 2)))
    scored = _masked(logprobs.reshape(B, L), lengths), _masked(entropies.reshape(B, L), lengths)
    if not keep:
        return scored, None
    taken = {name: found[name].reshape(B, L, -1) for name in chosen}
    return scored, Kept(tuple(found[name] for name in taps), taken, hidden)


def _replay(routes: Routes, rows: int, num_layers: int) -> Edits | None:
    """Returns edits that replace the routes of so many rows: i32[rows, k] by name."""
    number = jnp.arange(rows, dtype=jnp.int32)
    return make_edits(
        {name: jax.tree_util.Partial(_routes_of_rows, each) for name, each in routes.items()},
        num_layers,
        HookRows(number, jnp.zeros_like(number), jnp.zeros_like(number)),
    )


def _routes_of_rows(routes: jax.Array, value: jax.Array, rows: HookRows) -> jax.Array:
    return routes.at[rows.slot].get(mode="clip")


def _keep(
    how: Served,
    params: Params,
    adapter: Adapter | None,
    tokens: jax.Array,
    lengths: jax.Array,
    routes: Routes,
    temperature: jax.Array,
) -> tuple:
    scored, kept = _forward(how, params, adapter, tokens, lengths, routes, temperature, keep=True)
    return scored, (params, adapter, tokens, lengths, routes, temperature, kept)


def _pull(how: Served, residuals: tuple, of: Scored) -> tuple:
    """Returns the gradients of _scored's arguments from params on."""
    masters, adapter, tokens, lengths, routes, temperature, kept = residuals
    params, low, of = _alone((_cast(how, masters), None if adapter is None else _cast(how, adapter), of))
    (B, L), config, formats = tokens.shape, how.config, dict(how.formats)
    of_logprobs, of_entropies = (_masked(each, lengths).reshape(-1) for each in of)

    own = params.embed if params.head is None else params.head
    of_head = formats.get(HEAD, formats.get(EMBED, ()) if params.head is None else ())

    def top(norm: jax.Array, w: Weight, hidden: jax.Array) -> Scored:
        rows, heat = norm_rows(hidden, norm, config, DIFFERENTIABLE), temperature * config.logit_divisor
        # A cap comes after the divisor, so that this much of the plain product is capped.
        cap = None if config.logit_softcap is None else config.logit_softcap * config.logit_divisor
        return _unpaged_head(rows, _straight(w, of_head), _targets(tokens), jnp.full(B * L, heat), cap)

    _, pull = jax.vjp(top, params.norm, own, kept.hidden)
    dnorm, dhead, dx = pull((of_logprobs, of_entropies))
    dx, layers = dx.reshape(B, L, -1), []
    of_low: dict[str, list[LowRank]] = {name: [] for name in low or {}}
    targets = all_targets(config)
    for i in reversed(range(config.num_layers)):
        named = {field: f"{layer_prefix(i)}{entry.name}" for field, entry in matrix_entries(params.layers[i]).items()}
        wanted = tuple((field, formats.get(name, ())) for field, name in named.items())
        x, chosen = kept.inputs[i].reshape(B, L, -1), kept.routes.get(f"layers.{i}.routes")
        # A layer waits for the gradient of the one after it, so that memory holds one layer's inner values.
        here = {
            name: each.of_layer(targets[name], i) for name, each in (low or {}).items() if i in targets[name].layers
        }
        static = config.one_layer(i), _differing(how), wanted
        dlayer, dlow, dx = _pull_layer(*static, params.layers[i], here, x, chosen, dx)
        layers.append(dlayer)
        for name, each in dlow.items():
            of_low[name].append(each)
    _, pull = jax.vjp(lambda w: embed(w, tokens.reshape(-1), how.dtype), params.embed)
    dx = dx if config.embedding_multiplier == 1 else dx * jnp.asarray(config.embedding_multiplier, dx.dtype)
    (dembed,) = pull(dx.reshape(B * L, -1))
    if params.head is None:
        dembed, dhead = jax.tree.map(_sum, dembed, dhead), None
    found = Params(dembed, tuple(reversed(layers)), dnorm, dhead)
    dadapter = None
    if adapter is not None:
        stacked = {
            name: (jnp.concatenate([one.a for one in each[::-1]]), jnp.concatenate([one.b for one in each[::-1]]))
            for name, each in of_low.items()
        }
        dadapter = {name: replace(adapter[name], a=a, b=b) for name, (a, b) in stacked.items()}
        dadapter = jax.tree.map(_as_master, dadapter, adapter)
    zeros = jax.tree.map(lambda x: np.zeros(x.shape, jax.dtypes.float0), (tokens, lengths, routes))
    return jax.tree.map(_as_master, found, masters), dadapter, *zeros, jnp.zeros_like(temperature)


_scored.defvjp(_keep, _pull)


@partial(jax.jit, static_argnums=(0, 1, 2))
def _pull_layer(
    config: LlamaConfig,
    stored: tuple[KVFormat, KVFormat] | None,
    formats: tuple[tuple[str, Formats], ...],
    layer: LayerParams,
    adapter: Adapter,
    x: jax.Array,
    routes: jax.Array | None,
    dx: jax.Array,
) -> tuple[LayerParams, Adapter, jax.Array]:
    """Returns the gradients by one layer's weights, by its part of an adapter, and by its input x [B, L, E], for that
    of its output. `routes` i32[B, L, k] are those of its experts."""

    def unpaged(layer: LayerParams, adapter: Adapter, x: jax.Array) -> jax.Array:
        changed = {field: _straight(matrices(layer)[field], some) for field, some in formats if some}
        coded = layer_with(with_matrices(layer, changed), adapter, config)

        def one(x: jax.Array, routes: jax.Array | None) -> jax.Array:
            position = jnp.arange(x.shape[0], dtype=jnp.int32)
            batch = Packed(position, position, jnp.zeros_like(position), stored)
            edits = None if routes is None else _replay({"layers.0.routes": routes}, x.shape[0], 1)
            return run_layers((coded,), config, x, batch, None, backend=TRAINING, edits=edits)[0]

        return jax.vmap(one)(x, routes)

    return jax.vjp(unpaged, layer, adapter, x)[1](dx)


def _unpaged_head(x: jax.Array, w: Weight, tokens: jax.Array, temperature: jax.Array, softcap: float | None) -> Scored:
    """Returns log-probabilities and entropies of the normed inputs x [T, E] of the head."""
    if isinstance(w, QuantizedWeight):
        wide = compute_dtype(x.dtype)
        x, w = rounded_inputs(x, w.format, w.input_scale).astype(wide), decoded(w, wide)
    return head_logprobs(x, w, tokens, temperature, softcap=softcap)


def _served(how: Served, params: Params) -> Params:
    """Returns the weights with which the engine serves."""
    formats = dict(how.formats)

    def convert(name: str, w: Weight, wanted: Formats) -> Weight:
        return encode(jax.lax.optimization_barrier(w), wanted[0]) if wanted else w

    return map_weights(convert, _cast(how, params), formats)


def _in_a_place(how: Served, adapter: Adapter | None) -> dict[str, Slots] | None:
    """Returns an engine's one place for adapters, with this one in it."""
    if how.rank is None:
        return None
    arrays = arrays_of(_cast(how, adapter or {}), choose_targets(how.config, how.targets), how.rank, how.dtype)
    return {
        name: Slots(*(jnp.asarray(leaf)[:, None] for leaf in jax.tree.leaves(each))) for name, each in arrays.items()
    }


def _straight(w: Weight, wanted: Formats) -> Weight:
    """Returns the weight in its format, with itself as the original that its gradient goes to."""
    if not wanted:
        return w
    assert not isinstance(w, QuantizedWeight), "_formats refuses such weights"
    return replace(encode(jax.lax.stop_gradient(w), wanted[0]), original=w)


def _cast[T](how: Served, params: T) -> T:
    """Returns params or an adapter with plain weights in the dtype that the engine serves."""

    def cast(leaf: Any) -> Any:
        if isinstance(leaf, QuantizedWeight) or leaf.dtype == how.dtype:
            return leaf
        return round_to(leaf, how.dtype) if leaf.dtype.itemsize > how.dtype.itemsize else leaf.astype(how.dtype)

    return jax.tree.map(cast, params, is_leaf=lambda leaf: isinstance(leaf, QuantizedWeight))


def _differing(how: Served) -> tuple[KVFormat, KVFormat] | None:
    """Returns the formats of K and V if a cache rounds them more than the model's dtype does."""
    return None if all(fmt == KVFormat(how.dtype.name) for fmt in how.stored) else how.stored


def _targets(tokens: jax.Array) -> jax.Array:
    return jnp.roll(tokens, -1, axis=1).reshape(-1)


def _masked(x: jax.Array, lengths: jax.Array) -> jax.Array:
    """Returns x [B, L] with 0 where a sequence has no next token."""
    last = jnp.minimum(lengths, x.shape[1])[:, None] - 1
    return jnp.where(jnp.arange(x.shape[1], dtype=jnp.int32)[None, :] < last, x, jnp.zeros((), x.dtype))


def _sum(a: jax.Array, b: jax.Array) -> jax.Array:
    return a if a.dtype == jax.dtypes.float0 else a + b


def _as_master(gradient: jax.Array, master: jax.Array) -> jax.Array:
    return gradient if gradient.dtype == jax.dtypes.float0 else gradient.astype(master.dtype)


@jax.custom_jvp
def _once[T](arrays: T) -> T:
    return arrays


@_once.defjvp
def _refuse_second(primals: Any, tangents: Any) -> NoReturn:
    raise EvaluationError(ONCE)


@jax.custom_jvp
def _constant(temperature: jax.Array) -> jax.Array:
    return temperature


@_constant.defjvp
def _refuse_by_temperature(primals: Any, tangents: Any) -> NoReturn:
    raise EvaluationError("token_logprobs is differentiable by params alone: give a temperature that is a constant")


@jax.custom_batching.custom_vmap
def _unbatched[T](arrays: T) -> T:
    return arrays


@_unbatched.def_vmap
def _refuse_vmap(size: int, batched: Any, arrays: Any) -> NoReturn:
    raise EvaluationError("token_logprobs has no vmap: give all sequences as rows of tokens [B, L]")


def _alone[T](arrays: T) -> T:
    """Returns the arrays, and raises EvaluationError under vmap and where they are differentiated."""
    return _unbatched(_once(arrays))
