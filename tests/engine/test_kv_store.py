"""K and V in a shared store: what one engine computed another one finds, and a store's faults cost no request."""

import os
import warnings
from dataclasses import replace

import jax
import numpy as np
import pytest

from jllm.engine.kv_store import SUFFIX, KVStore, StoringEngine
from jllm.engine.request import SamplingParams
from jllm.errors import ConfigError
from jllm.fingerprint import of_params
from jllm.quant.quantize import quantize
from pallas_kernels.quantized_weights import QuantizedWeight
from tests.tiny import one_size, serve, tiny_model

SIZES = one_size() | {"num_pages": 40}
PROMPT = [int(x) for x in np.random.default_rng(0).integers(3, 97, 21)]
PROMPTS = [PROMPT, [*PROMPT[:9], 50, 51], PROMPT[:8], [7, 8]]
PARAMS = [SamplingParams(temperature=0.9, seed=i, max_new_tokens=6, ignore_eos=True) for i in range(4)]


@pytest.fixture(scope="module", autouse=True)
def doubles():
    with jax.enable_x64(True):
        yield


@pytest.fixture(scope="module")
def model():
    return tiny_model("float64")


@pytest.fixture(scope="module")
def wanted(model):
    return [one.token_ids for one in serve(model, PROMPTS, PARAMS, **SIZES)]


def run(model, store, prompts=PROMPTS, **options):
    """Tokens by prompt, and how many tokens of prompts were found."""
    engine = StoringEngine(model, store, **(SIZES | options))
    names = [engine.submit(prompt, params) for prompt, params in zip(prompts, PARAMS)]
    ends = {event.id: event.completion.token_ids for event in engine.run() if event.completion}
    found = engine.stored_tokens
    engine.close()
    return [ends[name] for name in names], found


def test_keys_per_channel_are_stored_in_whole_blocks(model, tmp_path):
    options = SIZES | {"kv_cache": "kivi2-g8-r16"}
    plain = [one.token_ids for one in serve(model, PROMPTS, PARAMS, **options)]
    assert run(model, KVStore(tmp_path / "kv", block=4), kv_cache="kivi2-g8-r16") == (plain, 0)
    assert run(model, KVStore(tmp_path / "kv", block=4), kv_cache="kivi2-g8-r16") == (plain, 16)


@pytest.mark.parametrize("kv", [None, "k=int4-g8,v=int8-g16"])
def test_another_engine_with_other_pages_finds_what_one_computed(model, wanted, tmp_path, kv):
    store = KVStore(tmp_path / "kv", block=4)
    plain = [one.token_ids for one in serve(model, PROMPTS, PARAMS, **SIZES, kv_cache=kv)]
    assert run(model, store, kv_cache=kv) == (plain, 0)
    assert plain == wanted or kv is not None
    again, found = run(model, KVStore(tmp_path / "kv", block=4), page_size=16, kv_cache=kv)
    assert again == plain
    assert found == 20 + 8 + 7, "full blocks of each, and never the last token"
    assert not [path for path in (tmp_path / "kv").iterdir() if path.suffix != SUFFIX]


def test_other_weights_and_formats_find_nothing(model, tmp_path):
    store = KVStore(tmp_path, block=4)
    run(model, store)
    assert run(tiny_model("float64", seed=1), store)[1] == 0
    assert run(model, store, kv_cache="fp8")[1] == 0


@pytest.mark.parametrize("change", [{"rope_theta": 500.0}, {"norm_eps": 1e-3}, {"windows": (4, None)}], ids=str)
def test_the_same_weights_in_another_config_find_nothing(model, tmp_path, change):
    store, other = KVStore(tmp_path, block=4), replace(model, config=replace(model.config, **change))
    run(model, store)
    assert run(other, store)[1] == 0
    assert run(other, store)[1] == 35


def test_the_same_codes_that_meet_other_inputs_find_nothing(model, tmp_path):
    store = KVStore(tmp_path, block=4)
    eight = replace(model, params=quantize(model.params, "w8a8"))

    def without(leaf):
        return replace(leaf, format=replace(leaf.format, activations=None)) if is_quantized(leaf) else leaf

    plain = replace(model, params=jax.tree.map(without, eight.params, is_leaf=is_quantized))
    assert of_params(eight.params) == of_params(plain.params)
    run(eight, store)
    assert run(plain, store)[1] == 0
    assert run(eight, store)[1] == 35


@pytest.mark.parametrize("fault", ["cut", "other", "empty"])
def test_a_damaged_block_is_computed_and_written_anew(model, wanted, tmp_path, fault):
    store = KVStore(tmp_path, block=4)
    run(model, store, PROMPTS[:1])
    first, second = (path for path, _ in store._blocks(PROMPT, engine_about(model, store))[:2])
    data = second.read_bytes()
    second.write_bytes({"cut": data[:-5], "other": first.read_bytes(), "empty": b""}[fault])
    with pytest.warns(UserWarning, match="a block of stored K and V is computed again") as told:
        tokens, found = run(model, store, PROMPTS[:1])
    assert len(told) == 1
    assert "\n" not in str(told[0].message)
    assert (tokens, found) == (wanted[:1], 4)
    assert second.read_bytes() == data
    assert run(model, store, PROMPTS[:1]) == (wanted[:1], 20)


def engine_about(model, store):
    engine = StoringEngine(model, store, **SIZES)
    engine.close()
    return engine._about


def test_a_full_disk_costs_a_line_and_no_request(model, wanted, tmp_path, monkeypatch):
    store = KVStore(tmp_path, block=4)

    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("jllm.safetensors_io.os.replace", full)
    with pytest.warns(UserWarning, match="K and V are not stored: .*No space left on device") as told:
        assert run(model, store, PROMPTS[:1]) == (wanted[:1], 0)
    assert len(told) == 1
    assert list(tmp_path.iterdir()) == []


def test_the_least_recently_used_blocks_go_first(model, wanted, tmp_path):
    block = 2 * 2 * 2 * 16 * 4 * 8  # layers, K and V, heads, head_dim, tokens, bytes
    store = KVStore(tmp_path, block=4, max_bytes=int(3.9 * block))
    assert run(model, store, PROMPTS[:1]) == (wanted[:1], 0)
    there = [path for path, _ in store._blocks(PROMPT, engine_about(model, store))]
    assert kept(tmp_path) == there[:3], "a block whose beginning is gone would be of no use"
    assert run(model, store, PROMPTS[:1]) == (wanted[:1], 12)
    other = [50, *PROMPT[:8]]
    run(model, store, [other])
    found = [path for path, _ in store._blocks(other, engine_about(model, store))]
    assert kept(tmp_path) == [*found, there[0]], "the beginning goes last"
    with pytest.warns(UserWarning, match="may take 100 bytes, and a block has"):
        assert run(model, KVStore(tmp_path / "small", 100, 4), PROMPTS[:1]) == (wanted[:1], 0)


def is_quantized(leaf):
    return isinstance(leaf, QuantizedWeight)


def kept(folder):
    """Blocks from the newest to the oldest."""
    return sorted(folder.iterdir(), key=lambda path: -path.stat().st_mtime_ns)


def test_what_a_killed_writer_left_counts_and_goes(model, wanted, tmp_path):
    store = KVStore(tmp_path, block=4, max_bytes=100_000)

    def killed(*_):
        raise KeyboardInterrupt  # nothing is tidied up

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("jllm.safetensors_io.os.replace", killed)
        with pytest.raises(KeyboardInterrupt):
            run(model, store, PROMPTS[:1])
    (left,) = tmp_path.iterdir()
    with left.open("ab") as file:
        file.truncate(90_000)
    assert run(model, store, PROMPTS[:1]) == (wanted[:1], 0)
    assert not left.exists()
    assert run(model, store, PROMPTS[:1]) == (wanted[:1], 20)


def test_a_store_that_may_only_be_read_costs_no_block_and_no_request(model, wanted, tmp_path, monkeypatch):
    store = KVStore(tmp_path, block=4)
    run(model, store, PROMPTS[:1])
    there = {path: path.read_bytes() for path in tmp_path.iterdir()}

    def refuse(*_, **__):
        raise PermissionError(1, "Operation not permitted")

    with monkeypatch.context() as patch, warnings.catch_warnings():
        warnings.simplefilter("error")
        patch.setattr("jllm.engine.kv_store.os.utime", refuse)
        assert run(model, store, PROMPTS[:1]) == (wanted[:1], 20)
    assert {path: path.read_bytes() for path in tmp_path.iterdir()} == there
    damaged = store._blocks(PROMPT, engine_about(model, store))[1][0]
    damaged.write_bytes(b"")
    monkeypatch.setattr("jllm.engine.kv_store.Path.unlink", refuse)
    with pytest.warns(UserWarning, match="is computed again"):
        assert run(model, store, PROMPTS[:1]) == (wanted[:1], 4)


def test_a_folder_that_cannot_be_reached_costs_no_request(model, wanted, tmp_path, monkeypatch):
    store, stat = KVStore(tmp_path / "kv", block=4), os.stat

    def unreachable(path, *given, **more):
        if "kv" in os.fspath(path):
            raise PermissionError(13, "Permission denied")
        return stat(path, *given, **more)

    run(model, store, PROMPTS[:1])
    monkeypatch.setattr("os.stat", unreachable)
    assert store.find(PROMPT, engine_about(model, store)) is None
    assert store.lacks(PROMPT, engine_about(model, store))


def test_what_needs_its_prompt_computed_looks_for_nothing(model, tmp_path):
    store = KVStore(tmp_path, block=4)
    run(model, store, PROMPTS[:1])
    engine = StoringEngine(model, store, **SIZES)
    name = engine.submit(PROMPT, SamplingParams(prompt_logprobs=True, max_new_tokens=2))
    (end,) = [event.completion for event in engine.run() if event.completion]
    assert name == 0
    assert len(end.prompt_logprobs) == len(PROMPT) - 1
    assert engine.stored_tokens == 0
    engine.close()


def test_no_folder(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="cannot be a store"):
        KVStore(tmp_path / "file" / "kv")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert KVStore(tmp_path / "new").find([1] * 300, "") is None
    assert os.listdir(tmp_path / "new") == []
