"""The forward pass as a function: segments, windows, vmap, gradients, and the same numbers with and without a cache."""

from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jllm.model.backbone import Packed, Paged, backbone, head, packed_logits
from jllm.model.cache import make_cache, parse_kv_cache
from jllm.model.norms import rms_norm
from tests.tiny import tiny_model, with_fields

logits_of = partial(jax.jit, static_argnames="config")(packed_logits)
backbone_jit = partial(jax.jit, static_argnames="config")(backbone)


@pytest.fixture(autouse=True)
def x64():
    with jax.enable_x64(True):
        yield


def packed(*segments: list[int]) -> Packed:
    lengths = [len(s) for s in segments]
    ids = np.repeat(np.arange(len(segments)), lengths)
    positions = np.concatenate([np.arange(n) for n in lengths])
    return Packed(*(jnp.asarray(x, jnp.int32) for x in (sum(segments, []), positions, ids)))


def relative(a, b) -> float:
    return float(np.linalg.norm(np.asarray(a) - np.asarray(b)) / np.linalg.norm(np.asarray(b)))


@pytest.mark.parametrize("windows", [(), (4, None)])
def test_segments_do_not_see_each_other(windows):
    model = tiny_model("float64", windows=windows)
    one, two = [5, 6, 7, 8, 9, 10, 11], [20, 21, 22, 23, 24]
    logits = logits_of(model.params, model.config, packed(one, two))
    assert logits.dtype == jnp.float64
    alone = logits_of(model.params, model.config, packed(two))
    assert relative(logits[len(one) :], alone) < 1e-12


def test_a_window_forgets_and_no_window_does_not():
    full, windowed = tiny_model("float64", num_layers=1), tiny_model("float64", num_layers=1, windows=(4,))
    a, b = packed([5, 6, 7, 8, 9, 10]), packed([50, 60, 7, 8, 9, 10])  # differ where the last token's window ends
    last = [logits_of(m.params, m.config, x)[-1] for m in (full, windowed) for x in (a, b)]
    assert relative(last[0], last[1]) > 1e-3
    assert relative(last[2], last[3]) < 1e-12


def test_vmap_is_a_loop():
    model = tiny_model("float64")
    rows = [packed([5, 6, 7], [8, 9]), packed([1, 2, 3, 4, 5])]
    batch = jax.tree.map(lambda *x: jnp.stack(x), *rows)
    got = jax.vmap(lambda b: packed_logits(model.params, model.config, b))(batch)
    for i, row in enumerate(rows):
        assert relative(got[i], logits_of(model.params, model.config, row)) < 1e-12


@pytest.mark.parametrize("tie", [False, True])
def test_gradients_against_finite_differences(tie):
    model = tiny_model("float64", tie_embeddings=tie)
    batch, targets = packed([5, 6, 7, 8], [9, 10, 11]), jnp.asarray([6, 7, 8, 2, 10, 11, 2], jnp.int32)

    def loss(params):
        logits = packed_logits(params, model.config, batch)
        return -jnp.take_along_axis(jax.nn.log_softmax(logits), targets[:, None], axis=1).mean()

    gradient = jax.jit(jax.grad(loss))(model.params)
    rng = np.random.default_rng(1)
    direction = jax.tree.map(lambda x: jnp.asarray(rng.normal(size=x.shape)), model.params)
    slope = sum(
        float((g * d).sum()) for g, d in zip(jax.tree.leaves(gradient), jax.tree.leaves(direction), strict=True)
    )
    moved = [jax.tree.map(lambda x, d, h=h: x + h * d, model.params, direction) for h in (1e-6, -1e-6)]
    value = jax.jit(loss)
    assert slope == pytest.approx(float(value(moved[0]) - value(moved[1])) / 2e-6, rel=1e-6)


@pytest.mark.parametrize("windows", [(), (5, None)])
def test_paged_logits_of_every_row_are_those_without_a_cache(windows):
    """A prompt in two chunks and a decode, by hand, in scattered pages."""
    model = tiny_model("float64", windows=windows)
    ids = [5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15, 16]
    want = logits_of(model.params, model.config, packed(ids))
    cache = make_cache(model.config, 5, 8, parse_kv_cache("f64", model.config, jnp.float64))
    cache = jax.tree.map(lambda x: jnp.full_like(x, jnp.nan), cache)  # what was not written must not be read
    table = jnp.asarray([[3, 1]], jnp.int32)
    got = []
    for start, stop in [(0, 5), (5, 11), (11, 12)]:
        positions = jnp.arange(start, stop, dtype=jnp.int32)
        decode = stop - start == 1
        empty = jnp.zeros((0, 2), jnp.int32), jnp.zeros(0, jnp.int32)
        length = jnp.asarray([stop], jnp.int32)
        batch = Paged(
            tokens=jnp.asarray(ids[start:stop], jnp.int32),
            positions=positions,
            page=table[0, positions // 8],
            offset=positions % 8,
            decode_pages=table if decode else empty[0],
            decode_lengths=length if decode else empty[1],
            chunk_pages=empty[0] if decode else table,
            chunk_cu=jnp.asarray([0] if decode else [0, stop - start], jnp.int32),
            chunk_lengths=empty[1] if decode else length,
        )
        hidden, cache = backbone_jit(model.params, model.config, batch, cache)
        got.append(head(model.params, model.config, hidden))
    assert relative(jnp.concatenate(got), want) < 1e-12


def test_a_norm_rounds_before_its_weight_as_transformers_does():
    rng, bf16 = np.random.default_rng(0), jnp.bfloat16
    x, weight = rng.normal(size=(5, 64)).astype(bf16), rng.normal(size=64).astype(bf16)
    wide = x.astype(np.float32)
    normed = wide / np.sqrt((wide**2).mean(axis=1, keepdims=True) + np.float32(1e-5))
    got = np.asarray(rms_norm(jnp.asarray(x), jnp.asarray(weight), 1e-5))
    assert (got != normed.astype(bf16) * weight).mean() < 0.01  # float32 may differ in its last bit
    assert (got != (normed * weight.astype(np.float32)).astype(bf16)).mean() > 0.1


@pytest.mark.parametrize("qk_norm", [False, True])
def test_one_layer_against_numpy(qk_norm):
    """The formulas once more, from the papers and in float64: no code in common with the model. With norms of queries
    and keys as Qwen3 has them, and an eps that counts."""
    model = tiny_model("float64", num_layers=1, norm_eps=0.3)
    if qk_norm:
        norms = {"q_norm": jnp.linspace(0.5, 2, 16), "k_norm": jnp.linspace(1.5, -1, 16)}
        layers = (with_fields(model.params.layers[0], norms),)
        model = replace(model, params=replace(model.params, layers=layers))
    c, p = model.config, jax.tree.map(np.asarray, model.params)
    attention, mlp, ids = p.layers[0].attention, p.layers[0].mlp, np.array([5, 6, 7, 8, 9])
    H, K, D, T = c.num_heads, c.num_kv_heads, c.head_dim, len(ids)

    def norm(x, w):
        return x / np.sqrt((x**2).mean(-1, keepdims=True) + c.norm_eps) * w

    def rotate(x, position):  # one head, as complex numbers
        z = (x[: D // 2] + 1j * x[D // 2 :]) * np.exp(1j * position * c.rope_theta ** (-np.arange(0, D, 2) / D))
        return np.concatenate([z.real, z.imag])

    x = p.embed[ids]
    qkv = norm(x, attention.norm) @ attention.qkv.T
    q, k, v = np.split(qkv, [H * D, (H + K) * D], axis=1)
    if qk_norm:
        q, k = (norm(x.reshape(T, -1, D), w).reshape(T, -1) for x, w in ((q, attention.q_norm), (k, attention.k_norm)))
    attended = np.zeros((T, H, D))
    for h in range(H):
        g = h // (H // K)
        for i in range(T):
            qi = rotate(q[i, h * D : (h + 1) * D], i)
            scores = np.array([qi @ rotate(k[j, g * D : (g + 1) * D], j) for j in range(i + 1)]) / np.sqrt(D)
            weights = np.exp(scores - scores.max())
            attended[i, h] = weights / weights.sum() @ v[: i + 1, g * D : (g + 1) * D]
    x = x + attended.reshape(T, H * D) @ attention.o.T
    gate, up = np.split(norm(x, mlp.norm) @ mlp.gate_up.T, 2, axis=1)
    x = x + (gate / (1 + np.exp(-gate)) * up) @ mlp.down.T
    want = norm(x, p.norm) @ p.head.T
    got = logits_of(model.params, c, packed(ids.tolist()))
    assert relative(got, want) < 1e-12
    assert relative(logits_of(model.params, replace(c, rope_theta=9000.0), packed(ids.tolist())), want) > 1e-6
