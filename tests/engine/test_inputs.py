"""A request's own arrays: each request gets what it gets alone, with no slot or page of another one."""

from dataclasses import replace
from functools import partial, partialmethod

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.tree_util import Partial

from jllm.api import generate
from jllm.engine.device import Device
from jllm.engine.engine import Engine
from jllm.engine.sequence import Sequence
from jllm.errors import ConfigError, EvaluationError, RequestError, SnapshotError, WeightsError
from jllm.files.load import load
from jllm.files.snapshot import load_snapshot, save_snapshot
from jllm.model.backbone import packed_logits
from jllm.model.hooks import HookRows, Hooks
from jllm.model.paged import Packed
from jllm.model.taps import LINEAR
from jllm.programs.packed_step import packed_step
from jllm.step.buckets import Bucket
from tests.parity import PARITY
from tests.tiny import CONFIG, greedy, tiny_model, with_fields

pytest.importorskip("hypothesis")
from hypothesis import HealthCheck, given, settings  # noqa: E402
from hypothesis import strategies as st  # noqa: E402

E = CONFIG.hidden_size
SHAPES = {
    "vector": jax.ShapeDtypeStruct((E,), np.float32),
    "layer": jax.ShapeDtypeStruct((), np.int32),
    "scale": jax.ShapeDtypeStruct((), np.float32),
}


def steer(weight, value, rows):
    own = rows.own(rows.inputs)
    scale = jnp.where(own["layer"] == rows.layer, own["scale"], 0) * weight
    return value + (scale[:, None] * own["vector"]).astype(value.dtype)


def lower(x, rows):
    """Adds to q, k and v what the inputs say, of what the layer reads."""
    own = rows.own(rows.inputs)
    wide = (H + 2 * K) * D
    return jnp.tile(x * own["vector"].astype(x.dtype), (1, wide // E)) * own["scale"].astype(x.dtype)[:, None] * 0.1


H, K, D = CONFIG.num_heads, CONFIG.num_kv_heads, CONFIG.head_dim


def ban(logits, rows):
    """Each request bans the token that its layer's number names, if its scale is not 0."""
    own = rows.own(rows.inputs)
    banned = jnp.arange(logits.shape[1], dtype=jnp.int32)[None] == own["layer"][:, None] + 5
    return jnp.where(banned & (own["scale"] != 0)[:, None], -jnp.inf, logits)


HOOKS = Hooks(
    edit={"layers.*.output": Partial(steer, jnp.float32(1))},
    add={"layers.*.qkv": lower},
    logits_processor=ban,
    inputs=SHAPES,
)


def own(seed: int):
    """Inputs of a request: none for 0."""
    rng = np.random.default_rng(seed)
    vector = rng.normal(size=E).astype(np.float32)
    return None if seed == 0 else {"vector": vector, "layer": seed % 2, "scale": 2.0 * (seed % 3)}


SIZES = {"max_slots": 3, "page_size": 8, "num_pages": 9, "max_step_tokens": 8, "buckets": (Bucket(3, 5, 3),)}
LONG = tuple(range(10, 30))  # two whole pages, which requests of equal inputs share
asked = st.builds(
    lambda prompt, temperature, seed, new: (prompt, greedy(new, temperature=temperature, seed=seed)),
    prompt=st.sampled_from([LONG, LONG[:17], LONG[:9] + (3,), (5,)]),
    temperature=st.sampled_from([0.0, 1.0]),
    seed=st.integers(0, 9),
    new=st.integers(1, 24),
)
jobs = st.lists(st.tuples(asked, st.integers(0, 5), st.integers(0, 6)), min_size=2, max_size=7)


@pytest.fixture(scope="module")
def model():
    with jax.enable_x64(True):
        yield tiny_model("float64")


@pytest.fixture(autouse=True)
def wide(model):
    with jax.enable_x64(True):
        yield


def tokens_of(engine, given) -> list[tuple[int, ...]]:
    """Tokens of requests: a prompt with its sampling, the seed of its inputs, and the step at which it comes."""
    ids, done, clock = {}, {}, 0
    while len(done) < len(given):
        for i, ((prompt, sampling), seed, arrival) in enumerate(given):
            if arrival == clock:
                ids[engine.submit(prompt, sampling, inputs=own(seed))] = i
        done.update({ids[e.id]: e.completion.token_ids for e in engine.step() if e.completion})
        clock += 1
        assert clock < 1000
    return [done[i] for i in range(len(given))]


def apart(model, given, hooks=HOOKS) -> list[tuple[int, ...]]:
    """Returns what each request gets alone, without a prefix of another."""
    engine = Engine(model, **SIZES, prefix_cache=False, hooks=hooks)
    return [tokens_of(engine, [(asked, seed, 0)])[0] for asked, seed, _ in given if not engine.reset_metrics()]


@settings(max_examples=10, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(given=jobs)
def test_each_request_gets_what_it_gets_alone(model, given):
    """Also after preemption, in chunks, and with prefixes of those that bring the same arrays."""
    assert tokens_of(Engine(model, **SIZES, hooks=HOOKS), given) == apart(model, given)


TURNS = [((LONG, greedy(12)), seed, 40 * i) for i, seed in enumerate((1, 4, 0, 1, 4, 0))]  # one after the other
CROWD = [((LONG, greedy(24)), seed, i) for i, seed in enumerate((1, 2, 4, 5, 0))]


def test_arrays_do_what_the_formula_says(model):
    """Tokens from whole sequences without a cache; each request has its own; prefixes are shared by those alike."""
    engine = Engine(model, **SIZES, hooks=HOOKS)
    got = tokens_of(engine, TURNS)
    assert len(set(got)) == 3
    assert got[:3] == got[3:]
    assert engine.metrics()["prefix_hits"] == 3
    inputs = jax.tree.map(lambda x: jnp.asarray(x)[None], own(1))

    @jax.jit
    def logits_of(ids):
        batch = Packed(ids, jnp.arange(len(ids), dtype=jnp.int32), jnp.zeros_like(ids))
        return packed_logits(model.params, model.config, batch, HOOKS.edit, add=HOOKS.add, inputs=inputs)

    ids = jnp.asarray((*LONG, *got[0]), jnp.int32)
    slot = jnp.zeros(len(ids), jnp.int32)
    want = ban(logits_of(ids), HookRows(slot, slot, slot, inputs=inputs)).argmax(axis=1)[len(LONG) - 1 : -1]
    assert got[0] == tuple(want.tolist())


def shares_with_all(self):
    return None


def keeps_the_last_users(put, self, begun):
    put(self, [seq for seq in begun if seq.inputs is not None])


@pytest.mark.parametrize(
    "fault",
    [
        lambda m: m.setattr(Sequence, "key", property(shares_with_all)),
        lambda m: m.setattr(Device, "_put_inputs", partialmethod(partial(keeps_the_last_users, Device._put_inputs))),
    ],
    ids=["prefix shared across inputs", "inputs of the slot's last user"],
)
def test_faults_are_seen(model, monkeypatch, fault):
    want = apart(model, TURNS)
    assert tokens_of(Engine(model, **SIZES, hooks=HOOKS), TURNS) == want
    fault(monkeypatch)
    assert tokens_of(Engine(model, **SIZES, hooks=HOOKS), TURNS) != want


def test_preemption_forks_and_snapshots_keep_them(model, tmp_path):
    engine = Engine(model, **SIZES, hooks=HOOKS)
    assert tokens_of(engine, CROWD) == apart(model, CROWD)
    assert engine.metrics()["preemptions"] > 0
    (want,) = apart(model, CROWD[2:3])
    request = engine.submit(LONG, greedy(24), inputs=own(4))
    for _ in range(9):
        engine.step()
    engine.fork(request)
    kept = engine.snapshot(request)
    save_snapshot(tmp_path / "kept.safetensors", kept)
    assert [e.completion.token_ids for e in engine.run() if e.completion] == [want, want]
    other = Engine(model, **SIZES, hooks=HOOKS)
    done = len(kept.tokens) - len(LONG)
    other.resume(load_snapshot(tmp_path / "kept.safetensors"), greedy(24 - done))
    assert [e.completion.token_ids for e in other.run() if e.completion] == [want[done:]]


def shift(given, value, rows):
    return value + given["by"][None]


def test_an_update_does_not_share_dicts_of_its_hooks(model):
    def tokens():
        engine.submit((5, 6, 7), greedy(8))
        return [event.completion.token_ids for event in engine.run() if event.completion]

    given = {"by": jnp.zeros(E)}
    hooks = Hooks(edit={"layers.*.output": Partial(shift, given)})
    engine = Engine(model, **SIZES, hooks=hooks)
    given["by"] = jnp.linspace(-2, 2, E)
    engine.update(hooks=hooks)
    want = tokens()
    given["by"] = -3 * given["by"]
    assert tokens() == want


def test_an_update_takes_other_arrays_of_the_hooks(model):
    other, numpys = (replace(HOOKS, edit={"layers.*.output": Partial(steer, x(-1))}) for x in (jnp.float32, np.float32))
    engine = Engine(model, **SIZES, hooks=HOOKS)
    kept = tokens_of(engine, TURNS[:1])
    engine.submit((5,), greedy(9), inputs=own(1))
    engine.step()
    snapshot, programs = engine.snapshot(0 + 1), packed_step._cache_size()
    assert engine.update(hooks=numpys) == engine.version == 1
    list(engine.run())
    got = tokens_of(engine, TURNS[:1])
    assert got == apart(model, TURNS[:1], other) != kept
    assert packed_step._cache_size() == programs
    with pytest.raises(SnapshotError, match="other weights"):
        engine.resume(snapshot, greedy(3))
    for hooks, why in (
        (replace(HOOKS, edit={}), "hooks must have the engine's functions, and other arrays of the same shapes"),
        (replace(HOOKS, edit={"layers.*.output": Partial(steer, jnp.zeros(2))}), r"must be float32\[\], .* not float"),
    ):
        with pytest.raises(WeightsError, match=why):
            engine.update(hooks=hooks)
    with pytest.raises(WeightsError, match="an update takes params, a drafter or hooks"):
        engine.update()


def test_hooks_alone_do_not_bring_older_weights_back(model, monkeypatch):
    """Refuses an update without params where the newest weights could not be made."""
    engine, other = Engine(model, **SIZES, hooks=HOOKS), jax.tree.map(np.asarray, tiny_model("float64", 9).params)

    def no_room(*_):
        raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: no memory")

    monkeypatch.setattr("jllm.engine.weights._moved", no_room)
    engine.take_weights(engine.fit_weights(other, replaces=True))
    monkeypatch.undo()
    with pytest.raises(WeightsError, match="could not be made: RESOURCE_EXHAUSTED: no memory; give params"):
        engine.update(hooks=HOOKS)
    engine.update(other, hooks=HOOKS)
    assert tokens_of(engine, TURNS[:1]) == apart(replace(model, params=other), TURNS[:1])


def test_generate_takes_inputs_for_all_or_for_each(model):
    given = [own(1), None, own(4)]
    want = apart(model, [((LONG, greedy(6)), seed, 0) for seed in (1, 0, 4)])
    options = SIZES | {"hooks": HOOKS, "executables": None}
    got = generate(model, [LONG] * 3, greedy(6), inputs=given, **options)
    assert [c.token_ids for c in got] == want
    (got,) = generate(model, LONG, greedy(6), inputs=own(4), **options)
    assert got.token_ids == want[2]
    with pytest.raises(RequestError, match="2 pytrees of inputs for 3 prompts"):
        generate(model, [LONG] * 3, greedy(6), inputs=given[:2], **options)


def seen(user, slot, index, token, inputs):
    asks = inputs.at[slot].get(mode="clip") > 0
    return user.at[jnp.where(asks, slot, user.shape[0]), token].set(True, mode="drop")


def never(logits, rows):
    return jnp.where(rows.own(rows.user), -jnp.inf, logits)


def test_observe_reads_them(model):
    """Tests tokens that a prefix has, too. No request gets a value twice."""
    hooks = Hooks(
        logits_processor=never,
        observe=seen,
        user=np.zeros(CONFIG.vocab_size, bool),
        inputs=jax.ShapeDtypeStruct((), np.float64),
    )
    engine, found = Engine(model, **SIZES, hooks=hooks), []
    for number in (1.0, None, 1.0, None):
        engine.submit(LONG, greedy(24), inputs=number)
        found += [event.completion.token_ids for event in engine.run() if event.completion]
    assert found[:2] == found[2:]
    assert engine.metrics()["prefix_hits"] == 2
    assert [len({*LONG, *tokens}) == len(LONG) + 24 for tokens in found[:2]] == [True, False]


def prefix(value, rows):
    own = rows.own(rows.inputs)
    at = jnp.clip(rows.index, 0, own["rows"].shape[1] - 1)
    soft = jnp.take_along_axis(own["rows"], at[:, None, None], axis=1)[:, 0]
    return jnp.where((rows.index < own["count"])[:, None], soft.astype(value.dtype), value)


def test_a_soft_prompt_is_an_edit_of_the_embedding(model):
    """Rows in place of the first tokens: those of other tokens' embeddings make that prompt."""
    shapes = {"rows": jax.ShapeDtypeStruct((4, E), np.float64), "count": jax.ShapeDtypeStruct((), np.int32)}
    engine = Engine(model, **SIZES, hooks=Hooks(edit={"embedding": prefix}, inputs=shapes))
    prompt, meant = (0, 0, 0, 0, 7, 8), (11, 12, 13, 14, 7, 8)
    soft = {"rows": np.asarray(model.params.embed[jnp.asarray(meant[:4])]), "count": 4}
    for ids, inputs in ((prompt, soft), (meant, None), (prompt, None)):
        engine.submit(ids, greedy(8), inputs=inputs)
    got, want, plain = (e.completion.token_ids for e in engine.run() if e.completion)
    assert got == want != plain


def onwards(value, rows):
    own = rows.own(rows.inputs)
    here = (own["layer"] == rows.layer) & (rows.index >= own["first"])
    return value + jnp.where(here[:, None], own["vector"], 0)


def test_edits_by_request_are_those_of_transformers_with_forward_hooks():
    """Compares in float64 with logits that tests/data/make_hooked.py wrote."""
    data = np.load(PARITY.parent / "hooked.npz")
    llama = load(PARITY / "llama3")
    llama = replace(llama, params=jax.tree.map(lambda x: x.astype(jnp.float64), llama.params))
    names = {"layer": np.int32, "first": np.int32, "vector": np.float64}
    shapes = {name: jax.ShapeDtypeStruct((64,) * (name == "vector"), kind) for name, kind in names.items()}
    hooks = Hooks(edit={"layers.*.output": onwards}, inputs=shapes)
    engine = Engine(llama, **SIZES, hooks=hooks, taps=("logits",), tap_rows=3)
    for i, (layer, first) in enumerate(zip(data["layer"], data["first"])):
        inputs = {"layer": layer, "first": first, "vector": data[f"vector_{i}"]}
        engine.submit(data[f"prompt_{i}"], greedy(1), inputs=inputs, taps=("logits",))
    found = {event.id: event.completion.taps["logits"][0] for event in engine.run() if event.completion}
    for i in range(len(data["layer"])):
        np.testing.assert_allclose(found[i], data[f"logits_{i}"], rtol=0, atol=1e-10)


@pytest.mark.parametrize(
    ("inputs", "why"),
    [
        ({"vector": np.zeros(E)}, "inputs must be layer, scale, vector, .* not vector"),
        (3, "inputs must be layer, scale, vector, as the engine's hooks declare them, not int"),
        ({**own(1), "vector": np.zeros(5)}, rf"inputs: vector must be float32\[{E}\], not float64\[5\]"),
        ({**own(1), "layer": 1.5}, r"inputs: layer must be int32\[\], not float64\[\]"),
        ({**own(1), "layer": 2**40}, r"inputs: layer must be int32\[\], not int64\[\] of larger numbers"),
        ({**own(1), "scale": 1e39}, r"inputs: scale must be float32\[\], not float64\[\] of larger numbers"),
        ({**own(1), "scale": "much"}, r"inputs: scale must be float32\[\], not str"),
        ({**own(1), "scale": [[1], [1, 2]]}, "inputs: scale must be an array, not list"),
    ],
)
def test_bad_inputs_are_refused_in_one_line(model, inputs, why):
    engine = Engine(model, **SIZES, hooks=HOOKS)
    with pytest.raises(RequestError, match=why):
        engine.submit(LONG, greedy(3), inputs=inputs)
    assert not engine.has_work


def test_inputs_need_hooks_that_declare_them(model):
    with pytest.raises(RequestError, match="the engine's hooks declare none"):
        Engine(model, **SIZES).submit(LONG, greedy(3), inputs=own(1))
    with pytest.raises(ConfigError, match="one leaf is 3"):
        Hooks(inputs={"layer": 3})


@pytest.mark.parametrize(
    ("add", "why"),
    [
        ({"layers.0.up": lower}, r"unknown linear layer 'layers\.0\.up'; .* each with qkv, o, gate_up, down"),
        ({"layers.*.qkv": lower, "layers.1.*": lower}, r"addend of layers\.1\.qkv: two patterns match it"),
        ({"layers.*.o": lambda x, rows: x[:, :3]}, r"addend of o: its shape must be that .*, \[6, 32\], not \[6, 3\]"),
    ],
)
def test_bad_addends(model, add, why):
    batch = Packed(jnp.arange(6, dtype=jnp.int32), jnp.arange(6, dtype=jnp.int32), jnp.zeros(6, jnp.int32))
    with pytest.raises(EvaluationError, match=why):
        packed_logits(model.params, model.config, batch, add=add)


def test_an_addend_is_what_a_merged_weight_would_be(model):
    """Tests each linear layer, in the engine and over whole sequences."""
    rng = np.random.default_rng(0)
    layers = [asdict_of(layer) for layer in model.params.layers]
    deltas = {name: 0.02 * rng.normal(size=layers[0][name].shape) for name in LINEAR}
    merged = replace(
        model.params,
        layers=tuple(
            with_fields(
                layer,
                {name: getattr(layer.attention, name) + deltas[name] for name in ("qkv", "o")},
                {name: getattr(layer.mlp, name) + deltas[name] for name in ("gate_up", "down")},
            )
            for layer in model.params.layers
        ),
    )
    add = {f"layers.*.{name}": Partial(times, jnp.asarray(delta)) for name, delta in deltas.items()}
    ids = jnp.asarray(LONG, jnp.int32)
    batch = Packed(ids, jnp.arange(len(ids), dtype=jnp.int32), jnp.zeros_like(ids))
    got = packed_logits(model.params, model.config, batch, add=add)
    np.testing.assert_allclose(got, packed_logits(merged, model.config, batch), rtol=0, atol=1e-12)
    engines = Engine(model, **SIZES, hooks=Hooks(add=add)), Engine(replace(model, params=merged), **SIZES)
    (one,), (two,) = (tokens_of(engine, TURNS[2:3]) for engine in engines)
    assert one == two


def times(delta, x, rows):
    return x @ delta.T


def asdict_of(layer):
    return {
        name: getattr(part, name) for part in (layer.attention, layer.mlp) for name in LINEAR if hasattr(part, name)
    }
