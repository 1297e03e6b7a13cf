"""Which Mosaic kernels a function runs, by name and number: its trace tells, which needs no GPU."""

from collections import Counter
from collections.abc import Iterator
from typing import Any

from jax.extend.core import jaxprs_in_params

KERNEL = "mpmd_map"  # what calls one, in a trace
AFTER_LAYERS = Counter(norm_quant=1, sample_part=1, sample_row=1)


def equations(jaxpr: Any) -> Iterator[Any]:
    """The equations of a jaxpr and of all that it calls, as often as it does; loops have one body, and kernels are not
    looked into."""
    for equation in jaxpr.eqns:
        yield equation
        if equation.primitive.name != KERNEL:
            for inner in jaxprs_in_params(equation.params):
                yield from equations(inner)


def kernels_of(jaxpr: Any) -> Counter[str]:
    """How often each kernel runs."""
    return Counter(each.params["name"] for each in equations(jaxpr) if each.primitive.name == KERNEL)


def of_step(layers: int, *, chunks: bool, **products: int) -> Counter[str]:
    """The kernels of a step with decode rows, and prompt chunks or none; `products` says which a layer has beside those
    that every layer has."""
    layer = Counter(norm_quant=2, cache_update=1, decode_attention=1, decode_attention_merge=1)
    layer.update(products, prefill_attention=1 if chunks else 0)
    return Counter({name: layers * count for name, count in layer.items() if count}) + AFTER_LAYERS
