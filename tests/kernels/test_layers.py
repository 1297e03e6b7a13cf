"""Checks that kernels find a layer's pages among those of all layers, and never touch a neighbour's."""

from collections.abc import Callable
from dataclasses import replace
from functools import cache, partial
from typing import Any

import jax
import jax.numpy as jnp
import pytest

from pallas_kernels.cache_update import cache_update
from pallas_kernels.cache_update import mosaic_sm90 as update_mosaic
from pallas_kernels.cache_update import reference as update_reference
from pallas_kernels.cache_update import xla as update_xla
from pallas_kernels.cache_update.cases import Case as Update
from pallas_kernels.decode_attention import copy_sm90 as decode_copy
from pallas_kernels.decode_attention import decode_attention
from pallas_kernels.decode_attention import mosaic_sm90 as decode_mosaic
from pallas_kernels.decode_attention import xla as decode_xla
from pallas_kernels.decode_attention.cases import Case as Decode
from pallas_kernels.decode_attention.config import Config as DecodeConfig
from pallas_kernels.formats.kv_pages import KVPages, Pages, gather_tokens
from pallas_kernels.prefill_attention import copy_sm90 as prefill_copy
from pallas_kernels.prefill_attention import mosaic_sm90 as prefill_mosaic
from pallas_kernels.prefill_attention import prefill_attention
from pallas_kernels.prefill_attention import xla as prefill_xla
from pallas_kernels.prefill_attention.cases import Case as Prefill
from pallas_kernels.prefill_attention.config import Config as PrefillConfig
from tests.kernels.helpers import same_bits
from tests.kernels.interpreter import INTERPRET
from tests.kernels.layers import OWN, among, caught, check_attention, check_update, expected_of, plant

UPDATE = Update(
    rows=5, dropped=3, num_pages=3, heads=(2, 1), head_dim=64, page_size=8, k_format="int8-g8", v_format="bf16",
    dtype="bfloat16",
)  # fmt: skip
DECODE = Decode(
    lengths=(70,), heads=(1, 1), head_dim=64, page_size=16, k_format="bf16", v_format="bf16", dtype="bfloat16"
)
PREFILL = Prefill(
    q_lens=(3,), kv_lens=(70,), unused=0, heads=(1, 1), head_dim=64, page_size=16, k_format="bf16", v_format="bf16",
    dtype="bfloat16",
)  # fmt: skip
TINY = DecodeConfig(split=64, most_splits=8, per_sm=1, sms=1, stages=2, computing=1)
FEW = PrefillConfig(ctas=1, block_kv=64, warpgroups=1, alternate=False)
BY_WARPS = replace(DECODE, k_format="int8-g8", v_format="int4-g64")
PADDED = {"page_size": 8, "k_format": "int8-g64", "v_format": "int8-g64"}  # fewer scales a page than a copy moves


def no_jit(function: Any, **options: Any) -> Callable:
    """Returns the function under a jit, so that a planted fault finds no trace of another time."""
    return lambda *arguments: function.__wrapped__(*arguments, **options)


def reference_update(*arguments: Any) -> Any:
    q, pages = update_reference.cache_update(*arguments)
    return jnp.asarray(q), jax.tree.map(jnp.asarray, pages)


UPDATES = {
    "reference": reference_update,
    "xla": no_jit(update_xla.cache_update),
    "mosaic": no_jit(update_mosaic.cache_update, interpret=INTERPRET),
}


@pytest.mark.parametrize("backend", UPDATES)
def test_a_write_goes_to_its_layer_alone(backend):
    check_update(UPDATES[backend], UPDATE.inputs())


def decode(case: Decode, config: DecodeConfig | None) -> Callable[..., jax.Array]:
    if config is None:
        return no_jit(decode_xla.decode_attention, scale=case.scale, window=None)
    return no_jit(decode_mosaic.decode_attention, scale=case.scale, window=None, config=config, interpret=INTERPRET)


def prefill(case: Prefill, config: PrefillConfig | None) -> Callable[..., jax.Array]:
    if config is None:
        return no_jit(prefill_xla.prefill_attention, scale=case.scale, window=None)
    return no_jit(prefill_mosaic.prefill_attention, scale=case.scale, window=None, config=config, interpret=INTERPRET)


@pytest.mark.parametrize(
    ("case", "config"),
    [
        (BY_WARPS, None),
        (DECODE, TINY),
        (BY_WARPS, TINY),
        (replace(DECODE, **PADDED), replace(TINY, by_warps=False)),
    ],
    ids=str,
)  # fmt: skip
def test_decode_attention_reads_its_layer_alone(case, config):
    check_attention(decode(case, config), case.inputs())


@pytest.mark.parametrize(
    ("case", "config"),
    [
        (replace(PREFILL, k_format="int4-g8"), None),
        (PREFILL, FEW),
        (replace(PREFILL, **PADDED), FEW),
        (replace(PREFILL, q_lens=(3, 2), kv_lens=(30, 2), heads=(2, 2), page_size=8), replace(FEW, block_kv=128)),
    ],
    ids=str,
)
def test_prefill_attention_reads_its_layer_alone(case, config):
    check_attention(prefill(case, config), case.inputs())


def test_tokens_are_read_from_their_layer_alone():
    pages = DECODE.inputs()[1]
    table, index = jnp.asarray([[2, 0, 1]], jnp.int32), jnp.arange(48, dtype=jnp.int32)[None]
    for part, own in ((among(pages).k, pages.k), (among(pages).v, pages.v)):
        assert same_bits(gather_tokens(part, table, index, "float32"), gather_tokens(own, table, index, "float32"))


def test_one_of_several_layers_must_be_chosen():
    q, pages, *rest = DECODE.inputs()
    every = among(pages).at_layer(None)
    with pytest.raises(ValueError, match=r"the pages are of 3 layers: choose one with pages.at_layer\(i\)"):
        decode_attention(q, every, *rest, scale=DECODE.scale)
    other = replace(pages, v=among(pages).v)
    with pytest.raises(ValueError, match="pages are of 1 layers of K and 3 of V, expected N of each"):
        decode_attention(q, other, *rest, scale=DECODE.scale)


def test_a_layer_has_arrays_of_its_own():
    pages = DECODE.inputs()[1]
    every = among(pages)
    assert len(every) == 3
    assert same_bits(every[OWN], pages)
    assert same_bits(every[OWN - 3], pages)
    assert [layer.k.num_pages for layer in every] == [pages.k.num_pages] * 3
    with pytest.raises(IndexError, match="layer 3 of 3"):
        every[3]


BEFORE = "is added before the bound"
OF_ALL = "is bound by the pages of all layers"
FAULTS = {  # where, the right text, the wrong text, and the check that must fail
    f"xla's written page {BEFORE}": (
        Pages, "rows_written", "(page >= 0) & (page < self.num_pages)",
        "((page + self.layer_operand[0] * self.num_pages) < self.values.shape[0])", "update xla",
    ),
    f"xla's written page {OF_ALL}": (
        Pages, "rows_written", "(page < self.num_pages)", "(page < self.values.shape[0])", "update xla",
    ),
    f"xla's read page {OF_ALL}": (Pages, "rows_read", "self.num_pages - 1", "self.values.shape[0] - 1", "decode xla"),
    f"xla's read page {BEFORE}": (
        Pages, "rows_read",
        "jnp.clip(page, 0, self.num_pages - 1) + self.layer_operand[0] * self.num_pages",
        "jnp.clip(page + self.layer_operand[0] * self.num_pages, 0, self.values.shape[0] - 1)", "prefill xla",
    ),
    f"mosaic's written page {OF_ALL}": (
        update_mosaic, "_body", "(page < slots[0])", "(page < 3 * slots[0])", "update mosaic",
    ),
    f"mosaic's written page {BEFORE}": (
        update_mosaic, "_body", "(page >= 0) & (page < slots[0])",
        "(first_row + page >= 0) & (first_row + page < 3 * slots[0])", "update mosaic",
    ),
    f"mosaic's page of decodes {OF_ALL}": (
        decode_copy, "Copies", "self.shape.num_pages - 1", "3 * self.shape.num_pages - 1", "decode mosaic",
    ),
    f"mosaic's page of decodes {BEFORE}": (
        decode_copy, "Copies", "self.first_row + jnp.clip(page, 0, self.shape.num_pages - 1)",
        "jnp.clip(self.first_row + page, 0, 3 * self.shape.num_pages - 1)", "decode mosaic",
    ),
    f"mosaic's page of prompts {OF_ALL}": (
        prefill_copy, "_Pages", "plan.num_pages - 1", "3 * plan.num_pages - 1", "prefill mosaic",
    ),
    f"mosaic's page of prompts {BEFORE}": (
        prefill_copy, "_Pages", "jnp.clip(entry, 0, plan.num_pages - 1)",
        "jnp.clip(refs.layer[0] * plan.num_pages + entry, 0, 3 * plan.num_pages - 1) - refs.layer[0] * plan.num_pages",
        "prefill mosaic",
    ),
    **{
        f"the layer is ignored by {check}": (
            Pages, "layer_operand", "jnp.reshape(self.layer, 1)", "jnp.zeros(1, jnp.int32)", check,
        )
        for check in ("update xla", "decode xla", "prefill xla", "update mosaic", "decode mosaic", "prefill mosaic")
    },
}  # fmt: skip
CHECKS = {
    "update xla": (check_update, UPDATES["xla"], UPDATE),
    "update mosaic": (check_update, UPDATES["mosaic"], UPDATE),
    "decode xla": (check_attention, decode(BY_WARPS, None), BY_WARPS),
    "decode mosaic": (check_attention, decode(DECODE, TINY), DECODE),
    "prefill xla": (check_attention, prefill(PREFILL, None), PREFILL),
    "prefill mosaic": (check_attention, prefill(PREFILL, FEW), PREFILL),
}


@cache
def right(which: str) -> Any:
    """Returns the result that a check expects."""
    check, run, case = CHECKS[which]
    return expected_of(check, run, case.inputs())


@pytest.mark.parametrize("fault", FAULTS)
def test_seeded_faults_are_caught(fault, monkeypatch):
    place, name, old, new, which = FAULTS[fault]
    check, run, case = CHECKS[which]
    expected = right(which)
    plant(monkeypatch, place, name, old, new)
    assert caught(check, run, case.inputs(), expected)


def last_of_many(pages: KVPages) -> KVPages:
    """Returns pages that stand for the last layer's of pools with more than 2^31 elements. All others hold NaN or its
    like."""
    layers = 2**31 // pages.k.values.size + 2

    def part(own: Pages) -> Pages:
        def spread(x: jax.Array) -> jax.Array:
            every = jnp.full((layers, *x.shape), 0x7F if x.dtype.kind in "iu" else jnp.nan, x.dtype)
            return every.at[-1].set(x).reshape(-1, *x.shape[1:])

        return replace(jax.tree.map(jax.jit(spread), own), layers=layers)

    return KVPages(part(pages.k), part(pages.v)).at_layer(layers - 1)


@jax.jit
def written(now: Pages, before: Pages) -> list[jax.Array]:
    """Returns how many elements of each array changed in all layers."""
    pairs = zip(jax.tree.leaves(now.at_layer(None)), jax.tree.leaves(before.at_layer(None)), strict=True)
    return [jnp.sum((a != b) & ((a == a) | (b == b)), dtype=jnp.int32) for a, b in pairs]


@pytest.mark.gpu
@pytest.mark.parametrize("backend", ["mosaic", "triton"])
def test_gpu_pools_beyond_2_31_elements(backend):
    if backend == "triton":
        pytest.importorskip("jax_triton")
    *arrays, pages, page, offset = UPDATE.inputs()
    many = last_of_many(pages)
    update = partial(cache_update, backend=backend)
    (q, alone), (found, now) = update(*arrays, pages, page, offset), update(*arrays, many, page, offset)
    assert same_bits(found, q)
    for part, whole, own, before in ((now.k, many.k, alone.k, pages.k), (now.v, many.v, alone.v, pages.v)):
        assert same_bits(part[part.layers - 1], own)
        assert same_bits(written(part, whole), written(own, before))
    del many, now, part, whole
    for case in (DECODE, BY_WARPS):
        q, pages, *rest = case.inputs()
        attend = partial(decode_attention, scale=case.scale, backend=backend)
        assert same_bits(attend(q, last_of_many(pages), *rest), attend(q, pages, *rest))
    q, pages, *rest = PREFILL.inputs()
    attend = partial(prefill_attention, scale=PREFILL.scale, backend=backend)
    assert same_bits(attend(q, last_of_many(pages), *rest), attend(q, pages, *rest))
