"""What a step of a 7B runs on a Hopper GPU where no backend is named: its kernels, by name and number."""

from collections import Counter
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jllm.files.hf_config import load_config
from jllm.model.cache import make_cache, parse_kv_cache
from jllm.model.layers import stack_layers
from jllm.model.param_specs import abstract_params
from jllm.programs.packed_step import Layout, packed_step
from jllm.quant.quantize import quantize
from jllm.step.buckets import Bucket
from jllm.step.state import State, make_slots
from pallas_kernels import backends
from tests.kernels_of import equations, kernels_of, of_step

LAYERS = 2
CONFIG = replace(load_config(Path(__file__).parents[2] / "configs" / "llama-2-7b.json"), num_layers=LAYERS)
ONE, SOME, MANY = Bucket(1, 0, 0), Bucket(64, 0, 0), Bucket(512, 0, 0)
MIXED, LARGE = Bucket(64, 384, 64), Bucket(512, 1536, 512)
KV = {"bf16": None, "w8a8": "int8-g8", "w4a16-g128": None}


@cache
def traced(scheme: str, bucket: Bucket, backend: str | None = "hopper") -> Any:
    """The jaxpr of a step, from shapes alone."""
    formats = parse_kv_cache(KV.get(scheme), CONFIG, jnp.bfloat16)
    layout = Layout(bucket, deltas=160)
    step = packed_step.trace(
        stack_layers(quantize(abstract_params(CONFIG, jnp.bfloat16), scheme), CONFIG),
        jax.eval_shape(lambda: State(make_cache(CONFIG, 4096, 16, formats), make_slots(512, 256))),
        jax.ShapeDtypeStruct((layout.size,), np.int32),
        config=CONFIG,
        layout=layout,
        backend=backend,
    )
    return step.jaxpr.jaxpr


# Of a layer, beside what each has. XLA's own product is the faster one for many rows; that of one row norms it, too,
# and quantizes it.
PRODUCTS = {
    "bf16": {
        ONE: {"gemv": 3, "gemv_gated": 1, "norm_quant": -2},
        SOME: {"gemm_skinny": 3, "gemm_skinny_gated": 1},
        MANY: {"gemm_skinny": 2, "gemm_skinny_gated": 1},
        MIXED: {"gemm_skinny": 2, "gemm_skinny_gated": 1},
        LARGE: {},
    },
    "w8a8": {
        ONE: {"gemv_int8": 2, "gemv_int8_gated": 1, "gemv": 1, "norm_quant": -2},
        SOME: {"gemm_skinny": 4, "silu_mul_quant": 1},
        MANY: {"gemm_tall": 3, "gemm_skinny": 1, "silu_mul_quant": 1},
        MIXED: {"gemm_tall": 3, "gemm_skinny": 1, "silu_mul_quant": 1},
    },
    "w4a16-g128": {
        ONE: {"weight_only_row": 3, "weight_only_row_gated": 1, "norm_quant": -2},
        **dict.fromkeys((SOME, MANY, MIXED), {"weight_only_matmul": 4}),
    },
}


def expected(scheme: str, bucket: Bucket) -> Counter[str]:
    return of_step(LAYERS, chunks=bucket.tokens > 0, **PRODUCTS[scheme][bucket])


@pytest.mark.parametrize(
    ("scheme", "bucket"), [(scheme, bucket) for scheme in KV for bucket in PRODUCTS[scheme]], ids=str
)
def test_the_kernels_of_a_7b_step(scheme, bucket):
    assert kernels_of(traced(scheme, bucket)) == expected(scheme, bucket)


@pytest.mark.parametrize("scheme", KV)
def test_a_model_that_is_told_mosaic_runs_the_same_kernels(scheme):
    assert kernels_of(traced(scheme, MIXED, "mosaic")) == kernels_of(traced(scheme, MIXED))


@pytest.mark.parametrize("backend", ["hopper", "mosaic"])
@pytest.mark.parametrize(
    ("bucket", "products"),
    [(ONE, {"gemv_int8": 2, "norm_quant": -2}), (SOME, {"gemm_skinny": 2}), (MANY, {"gemm_tall": 2})],
    ids=str,
)
def test_only_scales_of_groups_lack_kernels(bucket, products, backend):
    """O and down run in plain jnp, and naming mosaic is no error."""
    assert kernels_of(traced("w8a8-groups", bucket, backend)) == of_step(LAYERS, chunks=False, **products)


def test_a_hopper_gpu_runs_them_unasked(monkeypatch):
    assert kernels_of(traced("bf16", SOME, "xla")) == {}
    monkeypatch.setattr(backends, "on_hopper", lambda: True)
    assert kernels_of(traced("bf16", SOME, None)) == expected("bf16", SOME)


@pytest.mark.parametrize(("scheme", "bucket"), [("bf16", LARGE), ("w8a8", MIXED), ("w4a16-g128", ONE)], ids=str)
def test_what_attention_plans_is_planned_once_a_step(scheme, bucket):
    """Work lists are made by sorts and sums over rows: all layers share those of the step."""

    def planning(jaxpr: Any) -> Counter[str]:
        return Counter(each.primitive.name for each in equations(jaxpr) if each.primitive.name in ("sort", "cumsum"))

    step = traced(scheme, bucket)
    layers = layers_of(step)
    assert len(layers) == LAYERS
    assert planning(step)["sort"] == 1
    assert sum(map(planning, layers), Counter()) == {}


def layers_of(step: Any) -> list[Any]:
    return [each.params["jaxpr"] for each in step.eqns if each.params.get("name") == "_layer"]


@pytest.mark.parametrize(("scheme", "bucket"), [("bf16", SOME), ("w8a8", MIXED)], ids=str)
def test_all_layers_are_one_trace_and_make_no_page_table(scheme, bucket):
    """A layer's number is an operand of its kernels, which add its first page themselves."""
    first, *others = layers_of(traced(scheme, bucket))
    assert all(other is first for other in others)
    tables = [var.aval for var in first.jaxpr.invars if var.aval.shape in ((bucket.decodes, 256), (bucket.chunks, 256))]
    assert tables
    made = [var.aval for each in equations(first.jaxpr) if each.primitive.name != "jit" for var in each.outvars]
    assert not [aval for aval in made if (aval.shape, aval.dtype) in {(x.shape, x.dtype) for x in tables}]


def test_a_step_of_a_7b_takes_and_gives_few_arrays():
    """The host pays for each. Each layer adds its four matrices."""
    config = load_config(Path(__file__).parents[2] / "configs" / "llama-2-7b.json")
    step = traced("w8a8", SOME)
    assert len(step.invars) + 4 * (config.num_layers - LAYERS) <= 160
    assert len(step.outvars) <= 24
