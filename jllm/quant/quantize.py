"""Quantizes after training by rounding: Params in, Params with QuantizedWeight leaves out, one tensor at a time."""

from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from tqdm import tqdm

from jllm.config import LlamaConfig
from jllm.errors import QuantizationError
from jllm.model.param_specs import LeafSpec, param_specs, weight_specs
from jllm.model.params import EMBED, HEAD, Params, Weight, linears, map_linears, matrix_modules
from jllm.model.shards import fits, on_whole
from jllm.quant.schemes import Formats, Scheme, choose_format, find_scheme
from pallas_kernels.formats.quantized_weights import Origin, QuantizedWeight, encode
from pallas_kernels.formats.weight_formats import WeightFormat

DELAY = 2  # seconds after which a progress bar shows


def quantize(
    params: Params, scheme: str | Scheme, *, donate: bool = False, config: LlamaConfig | None = None
) -> Params:
    """Returns `params` with the weights that the scheme names rounded to nearest in its formats.

    With a config, formats must fit its mesh or its activation_parts. Params on that mesh are quantized one whole weight
    at a time. With `donate` each source array is deleted once it is quantized. Memory then holds at most one weight
    more than the source. Leaves may be jax.ShapeDtypeStruct. Then nothing is computed, and the result's leaves are
    abstract too.

    Raises QuantizationError for a scheme that does not fit these weights, before anything is done. Also raises it for
    weights that hold NaN or infinity.
    """
    if not isinstance(params, Params):
        hint = "take model.params, or jllm.quant.rotation.quantize_model for a whole model"
        raise QuantizationError(f"quantize takes Params, not {type(params).__name__}: {hint}")
    formats = formats_by_weight(params, scheme)
    specs: dict[str, LeafSpec] = {}
    if config is None:
        check_shapes(params, formats)
    else:
        specs, formats = weight_specs(config), that_fit(formats, config)
        check_shapes(param_specs(replace(config, tie_embeddings=params.head is None)), formats)
    count = sum(bool(wanted) for wanted in formats.values())
    with tqdm(total=count, desc="quantizing", unit="weight", delay=DELAY, leave=False, disable=None) as bar:

        def convert(name: str, leaf: Weight, wanted: Formats) -> Weight:
            if not wanted:
                return leaf
            if config is None:
                quantized: Weight = quantize_weight(name, leaf, wanted)
            else:
                quantized = on_whole(partial(quantize_weight, name, formats=wanted), leaf, specs[name], config)
            bar.update()
            return quantized

        return map_weights(convert, params, formats, release=_delete if donate else lambda leaf: None)


def formats_by_weight(params: Params, scheme: str | Scheme) -> dict[str, Formats]:
    """Returns Scheme.formats of these params. Raises QuantizationError for a scheme that rotates, since params do not
    contain the sizes of heads."""
    scheme = find_scheme(scheme)
    if scheme.rotate is not None:
        raise QuantizationError(
            f"scheme {scheme.name!r} rotates the model first: use jllm.quant.rotation.quantize_model, or "
            "rotate and then the scheme without rotation"
        )
    return scheme.formats(matrix_modules(params))


def map_weights(
    convert: Callable[[str, Any, Formats], Weight],
    params: Params,
    formats: Mapping[str, Formats],
    *,
    release: Callable[[Any], None] = lambda leaf: None,
) -> Params:
    """Returns params with convert(name, leaf, formats) for every matrix, a tied head included. Sources that were
    quantized are released. The head of a tied model is the embedding, unless its own rule gives it another format."""

    def one(name: str, leaf: Any) -> Weight:
        wanted = formats.get(name, ())
        new = convert(name, leaf, wanted)
        if wanted:
            release(leaf)
        return new

    separate = params.head is None and HEAD in formats and formats[HEAD] != formats.get(EMBED, ())
    head: Weight | None = None
    if params.head is not None:
        head = one(HEAD, params.head)
    elif separate:
        head = convert(HEAD, params.embed, formats[HEAD])
    kept = separate and not formats[HEAD]  # the head now uses the embedding's source
    embed = convert(EMBED, params.embed, formats.get(EMBED, ())) if kept else one(EMBED, params.embed)
    return map_linears(one, replace(params, embed=embed, head=head))


def that_fit(formats: Mapping[str, Formats], config: LlamaConfig) -> dict[str, Formats]:
    """Returns each weight's formats whose groups the config's mesh or activation_parts would not cut. If none fits,
    returns all, and cutting the weight raises an error later."""
    specs = weight_specs(config)
    return {
        name: tuple(fmt for fmt in wanted if fits(fmt, specs[name].entry, config)) or wanted
        for name, wanted in formats.items()
    }


def check_shapes(params: Params, formats: Mapping[str, Formats]) -> None:
    """Raises QuantizationError for a weight that none of its formats can hold. Leaves of `params` only need a shape."""

    def check(name: str, leaf: Any, wanted: Formats) -> Any:
        return choose_format(name, leaf.shape, wanted) if wanted else leaf

    map_weights(check, params, formats)


def quantize_weight(name: str, w: Weight, formats: Formats) -> QuantizedWeight:
    """Returns one weight [N, K], an array or a jax.ShapeDtypeStruct, in the first format that can hold it. Raises
    QuantizationError with its name."""
    if isinstance(w, QuantizedWeight):
        raise QuantizationError(f"{name} is quantized already ({w.format.name}); quantize the 16-bit weights instead")
    fmt = choose_format(name, w.shape, formats)
    if isinstance(w, jax.ShapeDtypeStruct):
        return abstract_weight(w, fmt)
    quantized, finite = _encode(w, fmt)
    if not finite:
        raise QuantizationError(f"{name} holds NaN or infinity, which no format can hold")
    return quantized


def abstract_weight(w: jax.ShapeDtypeStruct, fmt: WeightFormat) -> QuantizedWeight:
    """Returns the shapes of the QuantizedWeight that w [N, K] becomes. JAX traces it once for all weights of a
    shape."""
    return jax.eval_shape(partial(_encode, fmt=fmt), w)[0]


def encode_params(params: Params, formats: Mapping[str, Formats]) -> Params:
    """Returns quantize(params) with these formats, under jit too: it looks for no NaN."""

    def convert(name: str, leaf: Any, wanted: Formats) -> Weight:
        return _encode(leaf, choose_format(name, leaf.shape, wanted))[0] if wanted else leaf

    return map_weights(convert, params, formats)


def weight_formats(params: Params) -> dict[str, WeightFormat]:
    """Returns the name of each quantized weight -> its format."""
    leaves = {EMBED: params.embed, HEAD: params.head} | linears(params)
    return {name: leaf.format for name, leaf in leaves.items() if isinstance(leaf, QuantizedWeight)}


def with_chosen_codes(params: Params) -> Params:
    """Returns params whose codes are those of a calibration: rounding the model's weights does not give them."""

    def chosen(leaf: Any) -> Any:
        return replace(leaf, origin=Origin()) if isinstance(leaf, QuantizedWeight) else leaf

    return jax.tree.map(chosen, params, is_leaf=lambda leaf: isinstance(leaf, QuantizedWeight))


def _delete(leaf: object) -> None:
    if isinstance(leaf, jax.Array):
        leaf.delete()


@partial(jax.jit, static_argnums=1)
def _encode(w: jax.Array, fmt: WeightFormat) -> tuple[QuantizedWeight, jax.Array]:
    return encode(w, fmt), jnp.isfinite(w).all()
