"""K per channel in groups of tokens (KIVI), with the newest block of each sequence as it was computed: against the
definition in numpy, however tokens come."""

from dataclasses import replace
from functools import partial
from itertools import pairwise

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jllm.model.attention import AttentionInputs, paged_attention
from jllm.model.paged import Chunks, ShortSegments, paged_batch
from pallas_kernels import decode_attention
from pallas_kernels.cache_update import cache_update
from pallas_kernels.formats.kv_formats import Kivi, KVFormat, bytes_per_token, decode, dim_of, encode, parse_format
from pallas_kernels.formats.kv_pages import KVPages, Tail, allocate
from pallas_kernels.formats.kv_tail import allocate_tail, settle, with_row_map

pytest.importorskip("hypothesis")
from hypothesis import given, settings  # noqa: E402
from hypothesis import strategies as st  # noqa: E402

BITS, GROUP, BLOCK = 2, 8, 24
HEADS, KV_HEADS, DIM = 4, 2, 16
SLOTS, PAGES, PAGE = 3, 24, 16  # each slot has pages of its own, in no order
ROWS, CHUNK = 3, 40  # Q, and C
FORMATS = Kivi(f"int{BITS}", GROUP, residual=BLOCK), KVFormat("int4", 8, zero_point=True)
ORDER = np.random.default_rng(1).permutation(PAGES).astype(np.int32)
TABLE = ORDER.reshape(SLOTS, PAGES // SLOTS)
LONGEST = PAGE * PAGES // SLOTS


def rounded(x: np.ndarray, bits: int) -> np.ndarray:
    """x [n] as it is read back where these share a scale and a zero point."""
    zero = np.float64(np.float16(x.min() if abs(x.min()) >= 2.0**-14 else 0.0))
    scale = np.float64(np.float16(max((x.max() - zero) / (2**bits - 1), 2.0**-14)))
    return np.clip(np.rint((x - zero) / scale), 0, 2**bits - 1) * scale + zero


def stored(k: np.ndarray, v: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """K of whole groups [n, K, D] and V, as they are read from pages."""
    k = np.apply_along_axis(rounded, 1, k.reshape(-1, GROUP, KV_HEADS, DIM), BITS).reshape(k.shape)
    v = np.apply_along_axis(rounded, -1, v.reshape(*v.shape[:2], -1, 8), 4).reshape(v.shape)
    return k, v


def attend(q: np.ndarray, k: np.ndarray, v: np.ndarray) -> np.ndarray:
    """q [H, D], the query of the last of k, v [n, K, D]: blocks before its own are read as stored."""
    begin = (len(k) - 1) // BLOCK * BLOCK
    old_k, old_v = stored(k[:begin], v[:begin]) if begin else (k[:0], v[:0])
    k, v = np.concatenate([old_k, k[begin:]]), np.concatenate([old_v, v[begin:]])
    of = np.arange(HEADS) // (HEADS // KV_HEADS)
    scores = np.einsum("hd,nhd->hn", q, k[:, of])
    weights = np.exp(scores - scores.max(axis=1, keepdims=True))
    return np.einsum("hn,nhd->hd", weights / weights.sum(axis=1, keepdims=True), v[:, of])


@partial(jax.jit, donate_argnames="pages")
def step(q, k, v, pages: KVPages, short: ShortSegments, chunks: Chunks, slots):
    batch = paged_batch(short, chunks, num_pages=PAGES, page_size=PAGE, slots=slots)
    still = jnp.ones((len(q), DIM // 2)), jnp.zeros((len(q), DIM // 2))
    q, pages = cache_update(q, k, v, *still, with_row_map(pages, batch.row_map), batch.page, batch.offset)
    out = paged_attention(q, pages, AttentionInputs(*still, batch), scale=1.0, window=None, backend=None)
    return out, settle(pages)


def poisoned() -> KVPages:
    """Nothing may be read that was not written."""
    pages = allocate(PAGES, KV_HEADS, PAGE, DIM, *FORMATS)
    tail = allocate_tail(SLOTS, KV_HEADS, DIM, BLOCK + ROWS - 1, KVFormat("float64"))
    pools = replace(pages, tail=tail)
    return jax.tree.map(lambda x: jnp.full_like(x, jnp.nan if jnp.issubdtype(x.dtype, jnp.floating) else 85), pools)


class Sequences:
    """What slots hold, as steps computed it and as the definition has it."""

    def __init__(self, seed: int):
        self.rng, self.pages = np.random.default_rng(seed), poisoned()
        self.kv = [np.zeros((2, 0, KV_HEADS, DIM)) for _ in range(SLOTS)]

    def restart(self, slot: int) -> None:
        self.kv[slot] = self.kv[slot][:, :0]

    def step(self, lengths: dict[int, int], segments: dict[int, tuple[int, int]]) -> None:
        """Chunks of some lengths by slot, and segments: rows, and how many of them stay."""
        T = SLOTS * ROWS + CHUNK
        q = self.rng.normal(size=(T, HEADS, DIM))
        k, v = self.rng.normal(size=(2, T, KV_HEADS, DIM)) * np.where(np.arange(DIM) % 5 == 0, 4, 1) + 0.5
        start, rows = np.zeros(SLOTS, np.int32), np.zeros(SLOTS, np.int32)
        for slot, (count, _) in segments.items():
            start[slot], rows[slot] = self.kv[slot].shape[1], count
        at, which = np.zeros(SLOTS, np.int32), np.fromiter(lengths, np.int32)
        size, begin, table = np.zeros(SLOTS, np.int32), np.zeros(SLOTS, np.int32), np.zeros_like(TABLE)
        for b, slot in enumerate(which):
            at[b], size[b], begin[b], table[b] = slot, lengths[slot], self.kv[slot].shape[1], TABLE[slot]
        short = ShortSegments(np.zeros((SLOTS, ROWS), np.int32), start, rows, TABLE)
        chunks = Chunks(np.zeros(CHUNK, np.int32), begin, size, table)
        own = np.arange(SLOTS, dtype=np.int32), at
        out, self.pages = step(q, k, v, self.pages, short, chunks, own)
        first = {slot: slot * ROWS for slot in segments}
        ends = SLOTS * ROWS + np.cumsum([0, *lengths.values()])
        first |= {slot: int(a) for slot, (a, _) in zip(lengths, pairwise(ends), strict=True)}
        counts = {slot: count for slot, (count, _) in segments.items()} | lengths
        kept = {slot: stays for slot, (_, stays) in segments.items()} | lengths
        for slot, a in first.items():
            new = np.stack([k, v])[:, a : a + counts[slot]]
            whole = np.concatenate([self.kv[slot], new], axis=1)
            for i in range(counts[slot]):
                want = attend(q[a + i], *whole[:, : self.kv[slot].shape[1] + i + 1])
                np.testing.assert_allclose(out[a + i], want, rtol=0, atol=1e-10)
            self.kv[slot] = whole[:, : self.kv[slot].shape[1] + kept[slot]]


@st.composite
def plans(draw):
    """Steps: of each slot a chunk of some length, a segment with some rows that stay, nothing, or a new sequence."""
    found = []
    for _ in range(draw(st.integers(1, 7))):
        left, acts = CHUNK, {}
        for slot in draw(st.permutations(range(SLOTS))):
            kind = draw(st.sampled_from(["chunk", "chunk", "segment", "segment", "none", "new"]))
            if kind == "segment":
                rows = draw(st.integers(1, ROWS))
                acts[slot] = kind, (rows, draw(st.integers(1, rows)))
            elif kind != "none" and left:
                acts[slot] = kind, draw(st.integers(1, left))
                left -= acts[slot][1]
        found.append(acts)
    return found


@settings(max_examples=12)
@given(plan=plans(), seed=st.integers(0, 9))
def test_what_a_query_reads_follows_from_its_place_alone(plan, seed):
    with jax.enable_x64(True):
        run = Sequences(seed)
        for acts in plan:
            lengths, segments = {}, {}
            for slot, (kind, size) in acts.items():
                most = LONGEST - run.kv[slot].shape[1]
                if kind == "segment" and most >= ROWS:
                    segments[slot] = size
                elif kind != "segment":
                    if kind == "new" or size > most:
                        run.restart(slot)
                    lengths[slot] = size
            run.step(lengths, segments)


def test_rejected_drafts_across_a_block_are_stored_again():
    """The second row ends a block and goes; so does the third, over whose place in the ring another one was."""
    with jax.enable_x64(True):
        run = Sequences(0)
        run.step({0: BLOCK - 2}, {})
        for _ in range(2):
            run.step({}, {0: (3, 1)})
        for _ in range(BLOCK):
            run.step({}, {0: (2, 1)})


@pytest.mark.parametrize(("bits", "group", "dim"), [(2, 8, 16), (4, 16, 32), (2, 32, 64), (4, 8, 4)])
def test_a_group_is_stored_channel_by_channel(bits, group, dim):
    fmt = Kivi(f"int{bits}", group, residual=2 * group)
    x = np.random.default_rng(0).normal(1, 2, (3, 2 * group, dim))
    x[0, :, 1] *= 50
    with jax.enable_x64(True):
        values, numbers = jax.jit(lambda x: encode(x, fmt))(x)
        back = np.asarray(decode(values, numbers, fmt, jnp.float64))
    assert (values.shape, values.dtype) == ((3, 2 * group, dim * bits // 8), jnp.uint8)
    assert (numbers.shape, numbers.dtype) == ((3, 2 * group, 2 * dim // group), jnp.float16)
    want = np.apply_along_axis(rounded, 2, x.reshape(3, 2, group, dim), bits).reshape(x.shape)
    np.testing.assert_allclose(back, want, rtol=0, atol=1e-12)
    of_group = np.asarray(numbers).reshape(3, 2, 2, dim).astype(np.float64)  # scales of all channels, then zeros
    np.testing.assert_array_equal(of_group[:, :, 1], x.reshape(3, 2, group, dim).min(axis=2).astype(np.float16))
    code = np.asarray(values)[0, 0, 0].astype(int) & (2**bits - 1)  # of token 0, channel 0: the lowest bits
    signed = code - 2**bits if code >= 2 ** (bits - 1) else code
    scale, zero = of_group[0, 0, :, 0]
    assert np.isclose((signed + 2 ** (bits - 1)) * scale + zero, want[0, 0, 0], atol=1e-12)


def test_names_and_bytes():
    assert parse_format("kivi2-g32", 128) == Kivi("int2", 32, residual=128)
    for name in ("kivi2-g32", "kivi4-g32-r64", "int2-g16-zp"):
        assert parse_format(name, 64).name == name
        assert dim_of(name, parse_format(name, 64).row(64)) == 64
    k = Kivi("int2", 32)
    # A token of 8 heads of 128: 2 bits and 1/32 of two f16 a channel; V has 4 scales and zeros.
    assert bytes_per_token(128, 8, k, k.of_values()) == 8 * (32 + 16 + 32 + 16)
    for name, said in [
        ("kivi3-g32", "kivi2 and kivi4 have groups of N tokens"),
        ("kivi2-g32-h", "kivi2 and kivi4 have groups of N tokens"),
        ("kivi2-g32-r48", "must be 8, 16, 32, 64 or 128 and divide its block of 48 tokens and twice the head dim 64"),
        ("kivi2-g24-r48", "must be 8, 16, 32, 64 or 128 and divide its block of 48 tokens"),
        ("int2-g32", "int2-gN-zp"),
    ]:
        with pytest.raises(ValueError, match=said) as refusal:
            parse_format(name, 64)
        assert "\n" not in str(refusal.value)


def test_kernels_refuse_it_in_one_line_and_xla_takes_their_place():
    k = Kivi("int2", 32)
    pages = jax.eval_shape(lambda: allocate(4, 8, 32, 128, k, k.of_values()))
    q, rows = jax.ShapeDtypeStruct((2, 32, 128), jnp.bfloat16), jax.ShapeDtypeStruct((2, 8, 128), jnp.bfloat16)
    angles, where = jax.ShapeDtypeStruct((2, 64), jnp.float32), jax.ShapeDtypeStruct((2,), jnp.int32)
    table = jax.ShapeDtypeStruct((2, 4), jnp.int32)
    for backend in ("mosaic", "triton"):
        for run, *given_ in (
            (cache_update, q, rows, rows, angles, angles, pages, where, where),
            (partial(decode_attention.decode_attention, scale=0.1), q, pages, table, where),
        ):
            known = f"K stored as kivi2 is not supported by backend {backend}, which does bfloat16"
            with pytest.raises(NotImplementedError, match=known) as refusal:
                jax.eval_shape(partial(run, backend=backend), *given_)
            assert "\n" not in str(refusal.value)
    with pytest.raises(ValueError, match="K stored as kivi2-g32 needs a tail for the newest tokens"):
        jax.eval_shape(partial(cache_update, backend="hopper"), q, rows, rows, angles, angles, pages, where, where)


def test_a_ring_keeps_the_last_rows_of_a_chunk():
    """That is longer than the ring; those of others stay."""
    with jax.enable_x64(True):
        run = Sequences(3)
        run.step({1: CHUNK}, {0: (1, 1)})
        tail = run.pages.tail
        assert isinstance(tail, Tail)
        assert tail.rows is None
        ring, size = np.asarray(tail.k.values), BLOCK + ROWS - 1
        for i in range(CHUNK - size, CHUNK):
            np.testing.assert_array_equal(ring[1, :, i % size], run.kv[1][0, i])
        assert np.isnan(ring[2]).all()
        assert np.isnan(ring[0, :, 1:]).all()
