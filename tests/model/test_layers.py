"""Checks that layers in few arrays are the layers that were given."""

from dataclasses import replace

import jax
import pytest

from jllm.config import LlamaConfig
from jllm.model.layers import stack_layers
from jllm.model.model import Model
from jllm.model.param_specs import init_params
from jllm.model.params import Params
from jllm.quant.quantize import quantize
from tests.kernels.helpers import same_bits
from tests.tiny import CONFIG, EXPERTS, tiny_model


def coded(scheme: str) -> tuple[Params, LlamaConfig]:
    model = tiny_model(hidden_size=64, intermediate_size=64)
    return quantize(model.params, scheme), model.config


def plain(model: Model) -> tuple[Params, LlamaConfig]:
    return model.params, model.config


def mixed() -> tuple[Params, LlamaConfig]:
    """Returns a layer of experts between two dense ones."""
    experts = replace(EXPERTS, layers=(False, True, False))
    config = replace(CONFIG, hidden_size=64, intermediate_size=64, num_layers=3, experts=experts)
    return init_params(config, jax.random.key(0)), config


CASES = {  # what is stacked, the weights, their arrays, and how many fewer there are then
    "norms": (lambda: plain(tiny_model(hidden_size=64)), 15, 2),
    "norms and scales of rows": (lambda: coded("w8a8"), 21, 5),
    "norms, but not scales of groups": (lambda: coded("w4a16-g32"), 23, 2),
    "norms of the layers that look alike": (mixed, 22, 2),
    "nothing, where rows are not aligned": (lambda: plain(tiny_model(hidden_size=32)), 15, 0),
}


@pytest.mark.parametrize("what", CASES)
def test_vectors_of_layers_that_look_alike_are_one_array(what):
    make, arrays, fewer = CASES[what]
    params, config = make()
    stacked = stack_layers(params, config)
    assert len(jax.tree.leaves(params)) == arrays
    assert len(jax.tree.leaves(stacked)) == arrays - fewer
    assert len(stacked.layers) == len(params.layers)
    for got, want in zip(stacked.layers, params.layers, strict=True):
        assert jax.tree.structure(got) == jax.tree.structure(want)
        assert same_bits(got, want)
    abstract = jax.eval_shape(lambda x: x, params)
    assert jax.tree.map(jax.typeof, stack_layers(abstract, config)) == jax.tree.map(jax.typeof, stacked)
