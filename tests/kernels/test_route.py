"""Routes of tokens: which experts, with which shares, and where rows go."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import row_groups
from pallas_kernels.route import Here, Sorted, mosaic_sm90, reference, route, xla
from pallas_kernels.route.api import BACKENDS
from tests.kernels.helpers import same_bits, thinned
from tests.kernels.interpreter import FIND_RACES, INTERPRET

pytest.importorskip("hypothesis")
from hypothesis import given, settings
from hypothesis import strategies as st

T, X, K, E = 3, 8, 2, 128
SCORES = st.lists(
    st.lists(st.sampled_from([-np.inf, -3.0, -0.0, 0.0, 0.5, 4.0]), min_size=X, max_size=X), min_size=T, max_size=T
)
ROUTES = st.lists(st.lists(st.integers(-2, X + 1), min_size=K, max_size=K), min_size=T, max_size=T)


def inputs(tokens: int, experts: int, width: int = E, dtype="bfloat16"):
    """Returns scores with ties, and rows."""
    rng = np.random.default_rng(tokens)
    scores = np.round(2 * rng.normal(size=(tokens, experts)))
    return jnp.asarray(scores, dtype), jnp.asarray(rng.normal(size=(tokens, width)), dtype)


def check(made: Sorted, scores, x, routes, normalize: bool, experts: int | None = None, first: int = 0) -> None:
    """Compares what was made of `routes` with the reference."""
    experts = scores.shape[1] if experts is None else experts
    tokens, sizes, places, which = reference.sort_rows(np.asarray(routes) - first, experts)
    assert made.sizes.tolist() == sizes.tolist()
    assert made.experts.tolist() == np.repeat(range(experts + 1), [*sizes, routes.size - sizes.sum()]).tolist()
    assert same_bits(made.rows, jnp.asarray(x)[tokens])
    assert made.places.tolist() == places.tolist()
    shares = np.take_along_axis(reference.shares_of(scores, routes, normalize), which, axis=1)
    np.testing.assert_allclose(made.shares, shares, rtol=1e-5, atol=1e-7)
    if made.schedule is not None:
        block, apart, rows = made.schedule.block, made.schedule.apart, routes.size
        pairs = row_groups.pairs_of(made.sizes, rows, block, apart=apart)
        assert made.schedule.pairs.starts.tolist() == pairs.starts.tolist()
        assert made.schedule.pairs.before.tolist() == pairs.before.tolist()
        number = int(pairs.number(rows, block, apart))
        for got, want in zip(made.schedule.pairs[:4], pairs[:4], strict=True):
            assert got[:number].tolist() == want[:number].tolist()


@partial(jax.jit, static_argnames=("normalize", "backend", "count"))
def routed(scores, x, edited=None, first=None, *, normalize=True, backend="xla", count=X):
    kept = []
    here = None if count == X else Here(count, first)
    how = {"chosen": K, "normalize": normalize, "here": here, "seen": lambda routes: kept.append(routes) or routes}
    if edited is not None:
        how["seen"] = lambda routes: kept.append(edited) or edited
    if backend == "interpreted":
        made = mosaic_sm90.sort_tokens(scores, x, K, normalize, Here(X), how["seen"], 64, None, INTERPRET)
    else:
        made = route(scores, x, backend=backend, **how)
    return kept[0], made


@pytest.mark.parametrize(("backend", "examples"), [("xla", 40), ("deterministic", 20), ("interpreted", 8)])
@pytest.mark.parametrize("normalize", [True, False])
def test_any_scores_and_any_routes_are_as_defined(backend, examples, normalize):
    """Equal scores go to the lowest number. Given routes may name an expert twice, or none."""

    @given(SCORES, st.none() | ROUTES)
    @settings(max_examples=examples, deadline=None)
    def holds(scores, edited):
        scores = np.asarray(scores, np.float32)
        scores[:, 0] = np.where(np.isinf(scores).all(axis=1), 0, scores[:, 0])
        x = inputs(T, X)[1]
        given = None if edited is None else jnp.asarray(edited, jnp.int32)
        routes, made = routed(jnp.asarray(scores, "bfloat16"), x, given, normalize=normalize, backend=backend)
        if edited is None:
            assert routes.tolist() == reference.choose(scores, K).tolist()
        check(made, scores, x, np.asarray(routes), normalize)

    holds()


@pytest.mark.parametrize("backend", ["xla", "deterministic", "interpreted"])
def test_scores_without_a_share_are_compared_too(backend):
    """Softmax makes the same of both, nothing."""
    scores = jnp.asarray([[5, -400, -300, -300, -np.inf, -200, -250, -500]] * T, "bfloat16")
    for edited, best in ((scores, 5), (scores.at[:, 5].set(-450), 6)):
        routes, made = routed(edited, inputs(T, X)[1], backend=backend)
        assert routes.tolist() == [[0, best]] * T
        assert made.shares.tolist() == [[1, 0]] * T


@given(ROUTES, st.integers(0, X - 3))
@settings(max_examples=20, deadline=None)
def test_rows_of_experts_elsewhere_come_last(edited, first):
    scores, x = inputs(T, X)
    _, made = routed(scores, x, jnp.asarray(edited, jnp.int32), jnp.int32(first), count=3)
    check(made, scores, x, np.asarray(edited), True, 3, first)


def test_few_rows_are_sorted_as_many_are(monkeypatch):
    chosen = jnp.asarray(np.random.default_rng(0).integers(0, 5, 33), jnp.int32)
    compared = xla.places(chosen)
    monkeypatch.setattr(xla, "COMPARED", 0)
    for few, many in zip(compared, xla.places(chosen)):
        assert few.tolist() == many.tolist()
    assert compared[1].tolist() == np.argsort(chosen, kind="stable").tolist()


def test_what_does_not_fit_is_refused():
    scores, x = inputs(T, X)
    with pytest.raises(ValueError, match="9 of 8 experts are chosen"):
        route(scores, x, chosen=9, normalize=True)
    with pytest.raises(ValueError, match="x has shape"):
        route(scores, x[:2], chosen=2, normalize=True)
    for wrong, refusal in (
        ((scores[:, :7], x, 2, True), "2 of 7 experts are not supported by backend mosaic"),
        ((scores, x[:, :-8], 2, True), "multiples of 64"),
        ((scores, x, 2, False), "experts, some on other devices, are not supported"),
        ((scores, x.astype("float32"), 2, True), "rows of float32 is not supported"),
    ):
        assert refusal in BACKENDS["mosaic"].supports(*wrong)


KERNEL = [  # tokens, experts, chosen, width, normalize, rows of a block, and whether blocks are apart
    (1, 128, 8, 2048, True, 64, False),
    (1, 60, 4, 128, False, 8, True),
    (5, 60, 4, 1408, True, 8, False),  # a row in several pieces
    (2, 260, 3, 64, True, 64, False),
    (20, 8, 8, 128, False, 8, False),  # all experts, of several blocks each
    (20, 8, 8, 128, False, 8, True),
    (17, 132, 8, 128, True, 64, False),  # a schedule of two parts
    (17, 132, 8, 128, True, 8, True),
]


def interpreted(scores, x, chosen, normalize, block, seen=lambda routes: routes, apart=False):
    here = Here(scores.shape[1])
    return mosaic_sm90.sort_tokens(scores, x, chosen, normalize, here, seen, block, None, FIND_RACES, apart)


@pytest.mark.parametrize(
    ("processors", "case"),
    thinned([(processors, case) for processors in (132, 4) for case in KERNEL], (0, 1, 2, 6, 11, 12, 13, 14, 15)),
    ids=str,
)
def test_the_kernels_are_the_definition_without_races(monkeypatch, case, processors):
    """Also where a block has several tokens."""
    tokens, experts, chosen, width, normalize, block, apart = case
    monkeypatch.setattr(mosaic_sm90, "SMS", processors)
    scores, x = inputs(tokens, experts, width)
    made = interpreted(scores, x, chosen, normalize, block, apart=apart)
    check(made, scores, x, reference.choose(scores, chosen), normalize)


def test_many_tokens_and_given_routes_have_the_bits_of_few(monkeypatch):
    scores, x = inputs(5, 60)
    few = interpreted(scores, x, 4, True, 8)
    given = jnp.asarray(reference.choose(scores, 4), jnp.int32)
    replayed = interpreted(scores, x, 4, True, 8, lambda routes: given)
    alone = interpreted(scores[2:3], x[2:3], 4, True, 8)
    monkeypatch.setattr(mosaic_sm90, "MOST_TOKENS", 0)
    many = interpreted(scores, x, 4, True, 8)
    for other in (replayed, many):
        assert other.schedule is None
        assert same_bits(other[:5], few[:5])
    assert same_bits(alone.shares, few.shares[2:3])


def test_a_route_of_no_expert_has_no_share_of_scores_that_are_no_numbers():
    """Nor is it NaN where a thread has no expert."""
    scores, x = inputs(T, X)
    scores = scores.at[0].set(jnp.nan).at[1].set(-jnp.inf)
    given = jnp.asarray([[X, 3], [-1, X + 1], [X, 2]], jnp.int32)
    run = partial(mosaic_sm90.sort_tokens, interpret=INTERPRET)
    got, want = (each(scores, x, K, False, Here(X), lambda _: given, 64, None) for each in (run, xla.sort_tokens))
    np.testing.assert_allclose(got.shares, want.shares, rtol=1e-5)
    assert np.isnan(got.shares).sum() == 1


def test_scores_that_are_no_numbers_choose_as_many_experts():
    scores, x = inputs(T, X)
    scores = scores.at[0].set(jnp.nan).at[1, 5].set(jnp.nan).at[2, 1:].set(-jnp.inf)
    made = interpreted(scores, x, K, True, 64)
    assert made.sizes.sum() == T * K
    assert made.sizes[5] == 1
    assert np.isnan(made.shares[:2]).all()
    assert sorted(made.places.reshape(-1).tolist()) == list(range(T * K))


@pytest.mark.parametrize("which", ["few", "many", "given"])
def test_gradients_are_those_of_the_formula(monkeypatch, which):
    scores, x = inputs(T, X)
    given = jnp.asarray([[3, 1], [7, 7], [-1, 2]], jnp.int32)
    seen = (lambda routes: given) if which == "given" else (lambda routes: routes)
    if which == "many":
        monkeypatch.setattr(mosaic_sm90, "MOST_TOKENS", 0)

    def value(run, scores, x):
        made = run(scores, x, K, True, Here(X), seen, 64, None)
        weight = jnp.arange(made.rows.size, dtype=jnp.float32).reshape(made.rows.shape)
        return (made.rows.astype(jnp.float32) * weight).sum() + (made.shares[:, 1] - 2 * made.shares[:, 0]).sum()

    run = partial(mosaic_sm90.sort_tokens, interpret=INTERPRET)
    got, want = (jax.grad(partial(value, each), (0, 1))(scores, x) for each in (run, xla.sort_tokens))
    for mine, others in zip(got, want, strict=True):
        np.testing.assert_allclose(np.asarray(mine, "f"), np.asarray(others, "f"), rtol=1e-2, atol=1e-4)
        assert np.asarray(mine, "f").any()


FAULTS = {
    "a tie goes the other way": ("_numbers", lambda real: lambda axis: real(1 - axis)),
    "shares are normalized twice": (
        "_normalized",
        lambda real: lambda plan, shared, every, shares: real(plan, shared, every, real(plan, shared, every, shares)),
    ),
    "earlier tokens are forgotten": ("_begin", lambda real: lambda plan, shared, earlier: real(plan, shared, None)),
    "a row is moved to the first expert": (
        "_move",
        lambda real: lambda shared, numbers, *rest: real(shared, [numbers[0], *numbers[:-1]], *rest),
    ),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_faults_of_the_kernels_are_caught(monkeypatch, fault):
    name, change = FAULTS[fault]
    monkeypatch.setattr(mosaic_sm90, name, change(getattr(mosaic_sm90, name)))
    scores, x = inputs(6, X)

    def checked() -> None:
        check(interpreted(scores, x, 3, True, 64), scores, x, reference.choose(scores, 3), True)

    with pytest.raises((AssertionError, jax.errors.JaxRuntimeError)):
        checked()


SHAPES = [  # tokens, experts, chosen, width, and whether a hook changes routes
    (1, 128, 8, 2048, False), (1, 128, 8, 2048, True), (256, 128, 8, 2048, True), (9, 8, 2, 4096, False),
    (32, 60, 4, 2880, True), (1024, 512, 10, 2048, False), (65536, 512, 10, 2048, False), (65536, 512, 10, 2048, True),
]  # fmt: skip


@pytest.mark.parametrize(("tokens", "experts", "chosen", "width", "changes"), thinned(SHAPES, (0, 3, 4, 6)))
def test_shapes_of_models_lower_for_cuda(tokens, experts, chosen, width, changes):
    """A prompt of any length fits in a block's shared memory. Routes that a hook changes take other kernels."""
    scores, x = (jax.ShapeDtypeStruct((tokens, n), "bfloat16") for n in (experts, width))
    seen = (lambda routes: routes + 1) if changes else (lambda routes: routes)
    run = partial(mosaic_sm90.sort_tokens, chosen=chosen, normalize=True, here=Here(experts), seen=seen, block=64)
    assert "mosaic_gpu" in jax.jit(run).trace(scores, x).lower(lowering_platforms=("cuda",)).as_text()


@pytest.mark.gpu
@pytest.mark.parametrize("tokens", [1, 2, 32, 133, 256, 1024, 1500])
def test_gpu_kernels_are_the_definition(tokens):
    for experts, chosen, width, block in ((128, 8, 2048, 64), (60, 4, 2048, 128), (8, 2, 4096, 64), (384, 8, 7168, 8)):
        scores, x = inputs(tokens, experts, width)
        run = jax.jit(partial(route, chosen=chosen, normalize=True, block=block, backend="hopper"))
        check(run(scores, x), scores, x, reference.choose(scores, chosen), True)
