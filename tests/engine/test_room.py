"""A model or an engine that does not fit says what it needs, what there is, and what would fit; and that does fit."""

import re
from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp
import pytest

import jllm
from jllm.engine import device as device_module
from jllm.engine import room
from jllm.engine.device import Device
from jllm.engine.engine import Engine
from jllm.engine.options import make_options
from jllm.engine.room import check_room, sizes_for
from jllm.errors import ConfigError, NoRoomError, RequestError
from jllm.files import fit
from jllm.files.fit import check_weights, page_bytes, weight_bytes
from jllm.files.hf_config import load_config
from jllm.files.save import save
from jllm.model.hooks import Hooks
from jllm.model.param_specs import abstract_params, init_params
from jllm.parallel.memory import GIB, gib
from jllm.quant.quantize import quantize
from jllm.speculative.draft_model import DraftModel
from jllm.speculative.ngram import NGram
from jllm.speculative.quantized_copy import QuantizedCopy
from jllm.step.buckets import Bucket
from jllm.step.state import Variant, make_slots
from tests.tiny import greedy, serve, tiny_model

pytest.importorskip("hypothesis")
from hypothesis import given, settings  # noqa: E402
from hypothesis import strategies as st  # noqa: E402

CONFIGS = {name: load_config(f"configs/{name}.json") for name in ("llama-2-7b", "llama-3-8b", "qwen3-0.6b")}
PARAMS = {name: abstract_params(config, jnp.bfloat16) for name, config in CONFIGS.items()}


def refused(options, name: str, free: int, **changes) -> str | None:
    """What check_room says, None where it is content."""
    try:
        check_room(make_options(options), replace(CONFIGS[name], **changes), PARAMS[name], free)
    except NoRoomError as error:
        return str(error)
    return None


def proposals(text: str) -> list[dict[str, int | str]]:
    """The changes that an error names, each as keyword arguments."""
    found = text.partition("what would fit: ")[2].split("; ") if "what would fit: " in text else []
    made = []
    for one in found:
        pairs = re.findall(r"(\w+)=([^\s,]+)", one)
        made.append({key: int(value) if value.isdigit() else value for key, value in pairs})
    return made


@settings(max_examples=12)
@given(
    name=st.sampled_from(sorted(CONFIGS)),
    free=st.integers(1 << 20, 12 * GIB),
    slots=st.sampled_from([1, 7, 64, 512]),
    pages=st.none() | st.integers(512, 40_000),
    tokens=st.none() | st.sampled_from([1024, 8192]),
    given_buckets=st.booleans(),
    context=st.sampled_from([4096, 2**31 - 1]),
)
def test_what_is_proposed_fits_and_what_is_refused_does_not(name, free, slots, pages, tokens, given_buckets, context):
    options = {"max_slots": slots, "num_pages": pages, "max_step_tokens": tokens}
    if given_buckets:
        options["buckets"] = (Bucket(slots, 0, 0), Bucket(slots, (tokens or 1024) - slots, slots))
    config, params = replace(CONFIGS[name], context=context), PARAMS[name]
    said = refused(options, name, free, context=context)
    sizes = sizes_for(make_options(options), config, params, free)
    pool = sizes.limits.num_pages * page_bytes(config, jnp.bfloat16, None, 16)
    if said is None:
        assert pool <= free
        return
    assert "\n" not in said
    assert f"{gib(free)} free" in said
    for change in proposals(said):
        scheme = change.pop("quantize", None)
        less = 0 if scheme is None else fit.tree_bytes(params) - fit.tree_bytes(quantize(params, scheme))
        if given_buckets and ("max_slots" in change or "max_step_tokens" in change):
            s, t = change.get("max_slots", slots), change.get("max_step_tokens", tokens or 1024)
            change["buckets"] = (Bucket(s, 0, 0), Bucket(s, max(1, min(t, tokens or 1024) - slots), s))
        assert refused({**options, **change}, name, free + less, context=context) is None, change


def test_the_largest_number_of_pages_that_fits_is_named():
    said = refused({"max_slots": 64, "num_pages": 40_000}, "llama-2-7b", 20 * GIB)
    pages = proposals(said)[0]["num_pages"]
    assert refused({"max_slots": 64, "num_pages": pages}, "llama-2-7b", 20 * GIB) is None
    assert refused({"max_slots": 64, "num_pages": pages + 1}, "llama-2-7b", 20 * GIB) is not None
    assert "kv_cache=int8-g8" not in said  # 40,000 pages of 5 MiB
    assert "kv_cache=int4-g32" not in refused({"max_slots": 64, "num_pages": 40_000}, "llama-2-7b", 2 * GIB)
    endless = {"context": 2**31 - 1}  # tables of as many pages as the pool has, and those take memory as well
    pages = proposals(refused({"max_slots": 512, "num_pages": 10**9}, "qwen3-0.6b", 20 * GIB, **endless))[0][
        "num_pages"
    ]
    assert refused({"max_slots": 512, "num_pages": pages}, "qwen3-0.6b", 20 * GIB, **endless) is None
    assert refused({"max_slots": 512, "num_pages": pages + 1}, "qwen3-0.6b", 20 * GIB, **endless) is not None


@settings(max_examples=12)
@given(
    name=st.sampled_from(sorted(CONFIGS)),
    free=st.integers(1 << 20, 40 * GIB),
    dtype=st.sampled_from(["bfloat16", "float32"]),
    scheme=st.sampled_from([None, "w8a16", "w8a8", "nf4"]),
)
def test_weights_that_are_proposed_fit(tmp_path_factory, name, free, dtype, scheme):
    config, found = CONFIGS[name], fit.find_scheme(scheme) if scheme else None
    need = weight_bytes(config, dtype, scheme)
    folder = tmp_path_factory.getbasetemp()
    if need.peak <= free:
        check_weights(folder, config, dtype, found, free)
        return
    with pytest.raises(NoRoomError, match=re.escape(gib(need.peak))) as error:
        check_weights(folder, config, dtype, found, free)
    for change in proposals(str(error.value)):
        other = {"bf16": "bfloat16"}.get(change.get("dtype"), dtype)
        assert weight_bytes(config, other, change.get("quantize", scheme)).peak <= free
    assert "\n" not in str(error.value)


def test_weights_are_counted_as_they_will_be():
    model = tiny_model("bfloat16", hidden_size=64, intermediate_size=128)
    for scheme in (None, "w8a16", "nf4"):
        made = model.params if scheme is None else quantize(model.params, scheme)
        assert weight_bytes(model.config, "bfloat16", scheme).total == fit.tree_bytes(made)
    passing = weight_bytes(model.config, "bfloat16", "w8a16").passing
    assert passing == max(leaf.size * 2 for leaf in jax.tree.leaves(model.params.layers))


def test_loading_is_refused_before_anything_is_read(tmp_path, monkeypatch):
    model = tiny_model(hidden_size=64, intermediate_size=128, vocab_size=8000)  # larger than the least step
    save(tmp_path, model.params, model.config)
    need = model.memory_footprint()["total"]
    assert jllm.load(tmp_path, memory=lambda: need).memory_footprint()["total"] == need
    monkeypatch.setattr("jllm.files.load_params.read_tensor", None)
    with pytest.raises(NoRoomError, match="what would fit: dtype=bf16") as error:
        jllm.load(tmp_path, memory=lambda: need - 1)
    assert isinstance(error.value, ConfigError)
    with pytest.raises(NoRoomError, match="no smaller dtype or scheme would fit: it takes a larger device"):
        jllm.load(tmp_path, memory=lambda: 1000)


def test_a_quantized_checkpoint_counts_as_it_is_stored(tmp_path):
    model = tiny_model(hidden_size=64, intermediate_size=128)
    params = quantize(model.params, "w8a16")
    save(tmp_path, params, model.config)
    need = fit.tree_bytes(params)
    assert jllm.load(tmp_path, memory=lambda: need).params.norm.size == 64
    with pytest.raises(NoRoomError, match="its weights as they are stored need .* it takes a larger device"):
        jllm.load(tmp_path, memory=lambda: need - 1)


OPTIONS = {"max_slots": 4, "page_size": 8, "max_step_tokens": 16, "buckets": (Bucket(4, 16, 4),)}


def test_an_engine_is_refused_before_its_pool_is_made(monkeypatch):
    model = tiny_model()
    monkeypatch.setattr(device_module, "init_state", None)
    says = (
        r"64 KV pages of 8 tokens take 0\.25 MiB, .* the device has 0\.10 MiB free beside the weights; what would fit"
    )
    with pytest.raises(NoRoomError, match=says):
        Engine(model, device=partial(Device, memory=lambda: 100 << 10), num_pages=64, **OPTIONS)


def test_pages_by_default_leave_room_for_the_largest_step():
    model = tiny_model()
    page = page_bytes(model.config, "float32", None, 8)
    few = Engine(model, device=partial(Device, memory=lambda: 40 * page), **OPTIONS)
    assert 4 <= few.sizes.limits.num_pages < 36
    assert Engine(model, **OPTIONS).sizes.limits.num_pages == 64
    want = serve(model, [[5, 6, 7]], [greedy(5)], **OPTIONS)[0]
    few.submit([5, 6, 7], greedy(5))
    assert [e.completion.token_ids for e in few.run() if e.completion] == [want.token_ids]


def test_what_compiling_takes_is_left_and_no_more_than_a_share(monkeypatch):
    """Expects that the head's product is the largest of a 7B."""
    monkeypatch.setattr(room, "is_host", lambda: False)
    config, params = CONFIGS["llama-2-7b"], PARAMS["llama-2-7b"]
    options = make_options({"max_slots": 512, "max_step_tokens": 2048})
    page = page_bytes(config, jnp.bfloat16, None, 16) + 4 * 512  # with its entries of page tables
    for free, spare in ((60 * GIB, room.SLACK + room.TRIALS * 2 * 32000 * (4096 + 2048)), (8 * GIB, 0.05 * 8 * GIB)):
        pages = sizes_for(options, config, params, free).limits.num_pages
        need = room._reckon(replace(options, num_pages=pages), config, params.dtype, free)[1]
        assert spare <= free - need.total < spare + page


def test_recovery_does_not_ask_the_device_again(monkeypatch):
    """What was lost may still be counted as in use."""
    free = iter([1 << 30])
    engine = Engine(tiny_model(), device=partial(Device, memory=lambda: next(free)), **OPTIONS)
    engine.submit([5, 6, 7], greedy(5))
    engine._loop.recover(jax.errors.JaxRuntimeError("lost"))
    assert len([e for e in engine.run() if e.completion]) == 1


def test_the_operating_system_is_asked_where_the_device_is_a_cpu(monkeypatch):
    """It gave JAX's own RESOURCE_EXHAUSTED, or nothing until the machine was full."""
    monkeypatch.setattr(device_module, "init_state", None)
    with pytest.raises(NoRoomError, match=r"^1000000000 KV pages of 8 tokens take .* GiB free .*: num_pages=\d+ \("):
        Engine(tiny_model(), num_pages=10**9, **OPTIONS)
    monkeypatch.setattr("jllm.parallel.memory.host_memory", lambda: 1000)
    with pytest.raises(NoRoomError, match="its weights in float32 need .* and the device has 0.00 MiB free"):
        jllm.load()


def test_a_drafter_s_pools_and_memory_are_reckoned_with():
    config, params = CONFIGS["qwen3-0.6b"], PARAMS["qwen3-0.6b"]

    def need(**options):
        asked = make_options({"max_slots": 8, "num_pages": 512, **options})
        return room._reckon(asked, config, params.dtype, 100 * GIB)[1]

    def memory(drafter):
        """Of what it remembers, beside the masks of guides, of as many nodes as its tree has."""
        masks = 4 * 8 * (drafter.tree.depth * (-(-config.vocab_size // 32) + 2))
        return need(speculate=drafter).slots - plain.slots - masks

    plain, model, words, copy = need(), DraftModel(params, config), NGram(4, context=1000), QuantizedCopy(params)
    assert [need(speculate=drafter).pool for drafter in (model, words, copy)] == [
        2 * plain.pool,
        plain.pool,
        plain.pool,
    ]
    assert memory(model) == 8 * 4, "the newest token of each slot"
    assert memory(words) == 8 * 1000 * 4
    assert memory(copy) == 0, "it reads the target's own K and V"


@pytest.mark.parametrize("drafter", [None, NGram(3)], ids=["plain", "drafts"])
def test_masks_are_reckoned_with_as_the_state_has_them(drafter):
    model = tiny_model()
    options = make_options({"max_slots": 5, "num_pages": 16, "speculate": drafter})
    device = Device(model.config, model.params, options)
    masks = device.shapes.as_asked(device._state, Variant(guided=True)).guidance
    rest = jax.eval_shape(lambda: make_slots(5, device.sizes.max_pages))
    rest = rest if drafter is None else (rest, device._state.drafts.memory)
    reckoned = room._slot_bytes(options, model.config, model.params.dtype, device.sizes.max_pages)
    assert fit.tree_bytes(masks) == reckoned - fit.tree_bytes(rest)
    device.close()


def test_arrays_in_and_values_out_of_requests_are_reckoned_with():
    """8,192 rows of 32 layers are 2 GiB, twice: the newest step's, and those on their way to the host."""
    config, params = CONFIGS["llama-2-7b"], PARAMS["llama-2-7b"]

    def need(**more) -> int:
        options = make_options({"max_slots": 4, "num_pages": 64, **more})
        return room._reckon(options, config, params.dtype, 100 * GIB)[1].total

    assert need(taps=("layers.*.output",), tap_rows=8192) - need() == 4 * GIB
    vectors = Hooks(inputs=jax.ShapeDtypeStruct((config.hidden_size,), jnp.float32))
    assert need(hooks=vectors) - need() == 4 * config.hidden_size * 4


def test_a_cpu_keeps_its_memory_for_others_too():
    config, params = CONFIGS["llama-2-7b"], PARAMS["llama-2-7b"]
    pages = sizes_for(make_options({"max_slots": 32}), config, params, 100 * GIB).limits.num_pages
    assert pages * page_bytes(config, jnp.bfloat16, None, 16) == GIB


def test_a_context_without_end_takes_no_more_than_the_pool():
    """Page tables are as long as the pool; as long as the context, they would be 4 GiB here."""
    model = tiny_model(num_layers=1, context=2**31 - 1)
    engine = Engine(model, device=partial(Device, memory=lambda: 1 << 20), num_pages=16, **OPTIONS)
    assert engine.sizes.max_pages == 16
    engine.submit([5, 6, 7], greedy(126))
    assert [len(e.completion.token_ids) for e in engine.run() if e.completion] == [126]  # which fill the pool
    with pytest.raises(RequestError, match="the page pool has 16"):
        engine.submit([5, 6, 7], greedy(10**12))


def test_random_weights_take_what_is_counted():
    config = tiny_model().config
    params = init_params(config, jax.random.key(0), "float32")
    assert weight_bytes(config, "float32").peak == fit.tree_bytes(params)
