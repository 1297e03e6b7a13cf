"""A sequence's cache as a value: out of pages, into others of any size, into a file and back, bit for bit."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jllm.errors import OutputError, SnapshotError
from jllm.files import snapshot as snapshots
from jllm.files.safetensors_io import encode_header, read_metadata
from jllm.files.snapshot import Snapshot, cut, load_snapshot, put, save_snapshot, take
from jllm.model.cache import make_cache, parse_kv_cache
from jllm.step import merge as steps
from jllm.step.batch import PromptChunk, ragged_batch
from jllm.step.state import State, init_state
from pallas_kernels.formats.kv_pages import gather
from tests.tiny import CONFIG, tiny_model

FORMATS = ["f32", "bf16", "fp8", "int8-g8", "int4-g16", "k=int8-g16,v=f16", "k=int4-g16-zp,v=int8-g8-h"]
SMALL = replace(CONFIG, num_layers=2)


def random_cache(kv_cache: str, num_pages: int, page_size: int, seed: int = 0):
    """A cache of arbitrary bits."""
    rng = np.random.default_rng(seed)
    formats = parse_kv_cache(kv_cache, SMALL, jnp.float32)
    empty = jax.eval_shape(lambda: make_cache(SMALL, num_pages, page_size, formats))

    def noise(leaf):
        raw = rng.integers(0, 256, leaf.size * leaf.dtype.itemsize, np.uint8)
        return raw.view(leaf.dtype).reshape(leaf.shape)

    return jax.tree.map(noise, empty)


def bits(tree) -> list[bytes]:
    return [np.asarray(leaf).tobytes() for leaf in jax.tree.leaves(tree)]


SIZES = [(8, 32, 21), (16, 8, 32)]


@pytest.mark.parametrize(
    ("kv_cache", "old", "new", "length"), [*((f, 8, 8, 21) for f in FORMATS), *(("int8-g8", *sizes) for sizes in SIZES)]
)
def test_through_other_pages_and_back(kv_cache, old, new, length):
    source, target = random_cache(kv_cache, 6, old), random_cache(kv_cache, 7, new, seed=1)
    pages, others = [4, 1, 5, 0][: -(-length // old)], [6, 2, 0, 3][: -(-length // new)]
    source, first = jax.device_get((source, take(source, pages, range(length))))
    assert first.length == length
    for i, layer in enumerate(first.cache):  # the tokens' own bits, one by one
        for side in ("k", "v"):
            stored, dense = getattr(source[i], side), getattr(layer, side)
            numbers = stored.format.numbers(stored.head_dim)
            for t in (0, length // 2, length - 1):
                page, at = pages[t // old], t % old
                assert bits(dense.values[0, :, t]) == bits(stored.values[page, :, at])
                if numbers:
                    scales = dense.scales[0, :, t * numbers : (t + 1) * numbers]
                    assert bits(scales) == bits(stored.scales[page, :, at * numbers : (at + 1) * numbers])
    filled = put(target, others, first)
    assert bits(take(filled, others, range(length))) == bits(first)
    rest = [page for page in range(7) if page not in others]
    before, after = (jax.tree.map(lambda x: x[rest], [*jax.device_get(cache)]) for cache in (target, filled))
    assert bits(before) == bits(after)


def test_a_snapshot_is_a_cache_that_kernels_read():
    cache = jax.tree.map(jnp.asarray, random_cache("int8-g8", 4, 8))
    one = take(cache, [2, 0], range(13))
    whole = gather(cache[0].k, jnp.asarray([[2, 0]]), jnp.float32)[0, :, :13]
    np.testing.assert_array_equal(gather(one.cache[0].k, jnp.asarray([[0]]), jnp.float32)[0], whole)


@pytest.mark.parametrize("kv_cache", ["bf16", "int4-g16"])
def test_cut_is_the_snapshot_taken_earlier(kv_cache):
    cache = random_cache(kv_cache, 4, 8)
    whole = take(cache, [2, 0, 1], range(40), length=19)
    assert len(whole.tokens) == 40
    for length in (0, 7, 8, 19):
        assert bits(cut(whole, length)) == bits(take(cache, [2, 0, 1], range(length)))
        on_host = jax.device_get(whole)
        assert bits(cut(on_host, length)) == bits(cut(whole, length))
    assert bits(put(cache, [], cut(whole, 0))) == bits(cache)


@pytest.mark.parametrize("guided", [None, 17])
@pytest.mark.parametrize("kv_cache", FORMATS)
def test_a_file_holds_it_exactly(kv_cache, guided, tmp_path):
    """One without a guide is a file as those were before snapshots knew of guides."""
    one = replace(take(random_cache(kv_cache, 4, 8), [2, 0], range(50, 70), length=13), guided=guided)
    save_snapshot(tmp_path / "one.safetensors", one)
    back = load_snapshot(tmp_path / "one.safetensors")
    assert jax.tree.structure(back) == jax.tree.structure(one)
    assert [x.dtype for x in jax.tree.leaves(back)] == [x.dtype for x in jax.tree.leaves(one)]
    assert bits(back) == bits(one)
    assert back.guided == guided
    assert ("guided" in read_metadata(tmp_path / "one.safetensors")) == (guided is not None)
    assert [f.name for f in tmp_path.iterdir()] == ["one.safetensors"]


def test_float64_survives_a_process_without_it(tmp_path):
    with jax.enable_x64(True):
        cache = make_cache(SMALL, 2, 8, parse_kv_cache("f64", SMALL, jnp.float64))
        one = take(jax.tree.map(lambda x: x + 1 / 3, cache), [1], range(5))
        save_snapshot(tmp_path / "one", one)
    assert bits(load_snapshot(tmp_path / "one")) == bits(one)


def test_the_model_goes_on_from_it_by_hand():
    """As a notebook does: prefill, snapshot, restore in other pages of another cache, decode on."""
    with jax.enable_x64(True):
        model = tiny_model("float64", num_layers=1)

        def fresh() -> State:
            return init_state(model.config, slots=2, num_pages=6, page_size=8, max_pages=4, kv_cache="int8-g8")

        def step(state: State, *chunks: PromptChunk, decodes=()) -> tuple[State, int]:
            state, outputs = steps.step(model.params, state, ragged_batch(chunks, decodes), config=model.config)
            return state, int(outputs.tokens[0])

        tokens, pages = list(range(5, 25)), [3, 1, 0, 5]
        state, sampled = step(fresh(), PromptChunk(0, tokens, pages=pages))
        tokens.append(sampled)
        one = take(state.cache, pages, tokens, length=20)
        want = []
        for _ in range(5):
            state, sampled = step(state, decodes=[0])
            want.append(sampled)

        for slot, at, places in ((0, 20, [5, 4, 1, 2]), (1, 11, [0, 2, 4, 1])):  # the whole; a fork from earlier on
            empty = fresh()
            again = replace(empty, cache=put(empty.cache, places, cut(one, at)))
            again, sampled = step(again, PromptChunk(slot, tokens[at:], at, pages=places))
            got = [sampled]
            for _ in range(4):
                again, sampled = step(again, decodes=[slot])
                got.append(sampled)
            assert got == want


@pytest.mark.parametrize(
    ("pages", "tokens", "length", "message"),
    [
        ([0, 1], 20, None, "20 tokens need 3 pages of 8, not 2"),
        ([0, 0], 9, None, r"pages must be different ones in \[0, 4\), not \[0, 0\]"),
        ([0, 4], 9, None, r"different ones in \[0, 4\)"),
        ([0, -1], 9, None, r"different ones in \[0, 4\)"),
        ([0, 1], 9, 10, r"length must be in \[0, 9\]"),
    ],
)
def test_pages_that_cannot_hold_it_are_refused(pages, tokens, length, message):
    with pytest.raises(SnapshotError, match=message):
        take(random_cache("f32", 4, 8), pages, range(tokens), length)


def test_another_shape_or_format_is_refused():
    one = take(random_cache("int8-g8", 4, 8), [0], range(8))
    with pytest.raises(
        SnapshotError, match="the snapshot has 2 heads of 16, k=int8-g8.*the cache 2 heads of 16, k=f32"
    ):
        put(random_cache("f32", 4, 8), [0], one)
    with pytest.raises(SnapshotError, match="the snapshot has 2 layers, the cache 1"):
        put(random_cache("int8-g8", 4, 8)[0], [0], one)
    with pytest.raises(SnapshotError, match="no first 9"):
        cut(one, 9)


def test_damaged_files_are_refused(tmp_path):
    path = tmp_path / "one"
    one = take(random_cache("int8-g8", 4, 8), [0, 1], range(12))
    save_snapshot(path, replace(one, guided=10))
    whole = path.read_bytes()
    damages = {
        "truncated": whole[:-7],
        "not a snapshot of a KV cache": encode_header([]),
        "not a safetensors file": b"",
        r"garbled snapshot: unknown KV format 'int8-g!'": whole.replace(
            b'"k_format":"int8-g8"', b'"k_format":"int8-g!"'
        ),
        "garbled snapshot: its guide begins at token 13 of 12": whole.replace(b'"guided":"10"', b'"guided":"13"'),
        "garbled snapshot: its guide begins at token -1 of 12": whole.replace(b'"guided":"10"', b'"guided":"-1"'),
        "garbled snapshot: invalid literal for int": whole.replace(b'"guided":"10"', b'"guided":"x0"'),
        "garbled snapshot: layers.0.k.values is int8": whole.replace(b'"k_format":"int8-g8"', b'"k_format":"int4-g8"'),
        "garbled snapshot: 'layers.0.k.values'": whole.replace(b"layers.0.k.values", b"layers.0.q.values"),
    }
    for message, content in damages.items():
        path.write_bytes(content)
        with pytest.raises(SnapshotError, match=message):
            load_snapshot(path)
    with pytest.raises(SnapshotError, match="cannot be read"):
        load_snapshot(tmp_path / "missing")
    with pytest.raises(OutputError, match="cannot be written"):
        save_snapshot(tmp_path / "no" / "one", take(random_cache("f32", 4, 8), [0], range(3)))
    for name in ("guided", "weights", "kind"):
        with pytest.raises(SnapshotError, match=f"'{name}' is the name of a snapshot's own metadata"):
            save_snapshot(tmp_path / "two", one, {name: "3"})
    for at in (-1, 13, 6.0, "6", True):
        with pytest.raises(SnapshotError, match=r"guide begins at a token in \[0, 12\], or is None, not "):
            save_snapshot(tmp_path / "two", replace(one, guided=at))
    assert not (tmp_path / "two").exists()


@pytest.mark.parametrize("fault", ["scales", "order"])
def test_the_round_trip_notices(fault, monkeypatch):
    """Seeded faults: scales that stay behind, and pages in another order."""
    cache = random_cache("int8-g8", 6, 8)
    one, join = take(cache, [4, 1], range(16)), snapshots.join

    def faulty(rows, tokens, length):
        if fault == "order":
            return join(jax.tree.map(lambda x: x.reshape(2, 2, -1)[:, ::-1].reshape(x.shape), rows), tokens, length)
        made = join(rows, tokens, length)
        return Snapshot(made.tokens, jax.tree.map(lambda x: x * 0 if x.ndim == 3 else x, made.cache))

    monkeypatch.setattr(snapshots, "join", faulty)
    assert bits(take(cache, [4, 1], range(16))) != bits(one)
