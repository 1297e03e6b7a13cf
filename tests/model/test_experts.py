"""A Mixture of Experts: the formula, its routes as values, its formats, and the engine that serves it."""

import shutil
from dataclasses import replace
from functools import partial
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jllm.analysis.activations import tap
from jllm.config import Experts
from jllm.engine.engine import Engine
from jllm.errors import CheckpointError, ConfigError, EvaluationError, QuantizationError
from jllm.files.find import stored_tensors
from jllm.files.importers import stored_weights
from jllm.files.load import load
from jllm.files.peft import PREFIX, WEIGHTS, load_adapter, save_adapter
from jllm.files.safetensors_io import StoredTensor, read_as_stored, write_file
from jllm.model.adapters import choose_targets, init_adapter, merge_params
from jllm.model.backbone import Packed, packed_logits
from jllm.model.experts import ragged_linear, run_experts
from jllm.model.linear import linear
from jllm.model.mlp import mlp_block
from jllm.model.model import Model
from jllm.model.param_specs import abstract_params, param_specs, weight_specs
from jllm.model.params import EMBED, ExpertsParams, MLPParams, matrix_modules
from jllm.model.taps import Tap, tap_names
from jllm.quant.quantize import quantize, weight_formats
from jllm.quant.schemes import Scheme
from jllm.speculative.eagle import eagle_shapes
from pallas_kernels.backends import TARGET
from pallas_kernels.formats.quantized_weights import decode, encode
from pallas_kernels.formats.weight_formats import parse_weight_format
from pallas_kernels.route.xla import choose_experts, shares_of
from tests.kernels_of import kernels_of
from tests.parity import PARITY
from tests.tiny import CONFIG, EXPERTS, experts_model, full_logits, greedy, one_size, serve

IDS = [5, 6, 7, 8, 9, 10, 11, 12, 13]


@pytest.fixture(scope="module")
def model() -> Model:
    return experts_model()


def by_formula(mlp: ExpertsParams, x: np.ndarray, experts: Experts, eps: float) -> np.ndarray:
    """The block in numpy and float64, one token and one expert at a time."""
    X, F, E = experts.count, experts.ffn, x.shape[1]
    wide = {name: np.asarray(getattr(mlp, name), np.float64) for name in ("norm", "router", "gate_up", "down")}
    gate_up, down = wide["gate_up"].reshape(X, 2, F, E), wide["down"].reshape(X, E, F)
    out = x.astype(np.float64)
    rows = out / np.sqrt((out**2).mean(axis=1, keepdims=True) + eps) * wide["norm"]
    for t, row in enumerate(rows):
        likes = np.exp(wide["router"] @ row)
        likes /= likes.sum()
        chosen = np.argsort(-likes, kind="stable")[: experts.chosen]
        total = likes[chosen].sum() if experts.normalize else 1.0
        for i in chosen:
            gate, up = gate_up[i] @ row
            out[t] = out[t] + down[i] @ (gate / (1 + np.exp(-gate)) * up) * likes[i] / total
    return out


@pytest.mark.parametrize("normalize", [True, False])
def test_the_block_is_the_formula(normalize):
    experts = replace(EXPERTS, normalize=normalize)
    with jax.enable_x64(True):
        m = experts_model("float64", experts)
        x = np.random.default_rng(0).normal(size=(40, 32))
        got = jax.jit(lambda x: mlp_block(m.params.layers[1].mlp, x, config=m.config, backend="xla", tap=Tap(())))(x)
        want = by_formula(m.params.layers[1].mlp, x, experts, m.config.norm_eps)
        assert np.linalg.norm(got - want) / np.linalg.norm(want - x) < 1e-12


@pytest.mark.parametrize("backend", ["xla", "deterministic"])
@pytest.mark.parametrize("scheme", [None, "w8a8", "w4a16-g32"])
def test_no_rows_are_no_rows(model, backend, scheme):
    mlp = (model.params if scheme is None else quantize(model.params, scheme)).layers[1].mlp
    run = jax.jit(lambda x: mlp_block(mlp, x, config=model.config, backend=backend, tap=Tap(())))
    assert run(jnp.zeros((0, 32))).shape == (0, 32)
    none = jnp.zeros(5, jnp.int32)
    assert ragged_linear(jnp.zeros((0, 32)), mlp.gate_up, none, gated=True, backend=backend).shape == (0, 32)


def test_ties_go_to_the_lowest_number_and_one_expert_is_an_mlp():
    scores = jnp.asarray([[1.0, 3.0, 3.0, 3.0, 0.0], [2.0, 2.0, 2.0, 2.0, 2.0]])
    routes = choose_experts(scores, EXPERTS.chosen)
    assert routes.tolist() == [[1, 2], [0, 1]]
    np.testing.assert_allclose(shares_of(scores, routes, EXPERTS.normalize), 0.5, rtol=1e-6)
    m = experts_model(experts=Experts(count=1, chosen=1, ffn=48))
    mlp = m.params.layers[1].mlp
    dense = MLPParams(mlp.norm, mlp.gate_up, None, mlp.down, None)
    x = jax.random.normal(jax.random.key(1), (7, 32))
    got, want = (mlp_block(p, x, config=m.config, backend="xla", tap=Tap(())) for p in (mlp, dense))
    np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-6)


def test_the_table_names_each_expert_and_each_layer_has_its_kind(model):
    assert [type(layer.mlp) for layer in model.params.layers] == [MLPParams, ExpertsParams]
    modules = matrix_modules(model.params)["model.layers.1.mlp.experts.down_proj"]
    assert modules == tuple(f"model.layers.1.mlp.experts.{i}.down_proj" for i in range(5))
    specs = param_specs(model.config).layers[1].mlp
    assert [name for name, _ in specs.gate_up.parts[:3]] == [
        f"model.layers.1.mlp.experts.{name}.weight" for name in ("0.gate_proj", "0.up_proj", "1.gate_proj")
    ]
    assert (specs.gate_up.shape, specs.down.shape) == ((5 * 64, 32), (5 * 32, 32))
    assert model.config.one_layer(0).experts is None
    assert model.config.one_layer(1).experts == replace(EXPERTS, layers=())
    assert isinstance(eagle_shapes(replace(model.config, unrotated=(False, True)), "float32").layer.mlp, MLPParams)


@pytest.mark.parametrize("scheme", [None, "w8a8", pytest.param("w4a16-g32", marks=pytest.mark.exhaustive), "fp8-b128"])
def test_the_engine_serves_what_a_forward_without_a_cache_gives(model, scheme):
    m = model if scheme is None else replace(model, params=quantize(model.params, scheme))
    if scheme is not None:
        names = set(weight_formats(m.params))
        assert "model.layers.1.mlp.experts.gate_up_proj" in names
        assert "model.layers.1.mlp.gate" not in names  # the router stays
    prompts = [IDS, IDS[:4], IDS[2:]]
    done = serve(m, prompts, [greedy(8)] * 3, **one_size(3, tokens=12), deterministic=True)
    for prompt, each in zip(prompts, done, strict=True):
        logits = full_logits(m, [*prompt, *each.token_ids])
        assert each.token_ids == tuple(logits[len(prompt) - 1 : -1].argmax(axis=1).tolist())
    alone = serve(m, prompts[:1], [greedy(8)], **one_size(3, tokens=12), deterministic=True)
    assert alone[0].token_ids == done[0].token_ids


def test_a_router_needs_no_exception_of_a_quantized_file(model):
    specs, block = weight_specs(model.config), {"quant_method": "fp8", "weight_block_size": [128, 128]}
    at = {f"{part.removesuffix('.weight')}.weight_scale_inv" for spec in specs.values() for part, _ in spec.parts}
    stored = {name: StoredTensor(name, Path("m"), "F32", (1, 1), 0, 4) for name in at if ".mlp.gate." not in name}
    assert specs.keys() - stored_weights(block, specs, stored).keys() == {EMBED, "model.layers.1.mlp.gate"}


def test_quantized_experts_are_their_decoded_weights(model):
    mlp = quantize(model.params, "w4a16-g32").layers[1].mlp
    plain = replace(mlp, gate_up=decode(mlp.gate_up), down=decode(mlp.down))
    x = jax.random.normal(jax.random.key(1), (20, 32))
    scores = x @ mlp.router.T
    routes = choose_experts(scores, EXPERTS.chosen)
    shares = shares_of(scores, routes, EXPERTS.normalize)
    got, want = (run_experts(p, x, routes, shares, backend="xla") for p in (mlp, plain))
    np.testing.assert_allclose(got, want, rtol=1e-4, atol=1e-5)
    gradient = jax.grad(lambda x: ragged_linear(x, mlp.down, jnp.asarray([4, 4, 4, 4, 4], jnp.int32)).sum())
    wanted = jax.grad(lambda x: ragged_linear(x, plain.down, jnp.asarray([4, 4, 4, 4, 4], jnp.int32)).sum())
    np.testing.assert_allclose(gradient(x), wanted(x), rtol=1e-4, atol=1e-5)
    outliers = quantize(model.params, "llm-int8-t1").layers[1].mlp.down  # of which most inputs here have some
    got = ragged_linear(x, outliers, jnp.asarray([20, 0, 0, 0, 0], jnp.int32), backend="xla")
    np.testing.assert_allclose(got, linear(x, outliers, backend="xla")[:, :32], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(("scheme", "named"), [("w4a16-g32", 1), ("nf4-dq", 0)])
def test_kernels_run_by_default_on_the_formats_that_they_have(monkeypatch, scheme, named):
    monkeypatch.setenv(TARGET, "9.0")
    w = jax.eval_shape(lambda: encode(jnp.zeros((5 * 64, 64)), parse_weight_format(scheme)))
    x, sizes = jax.ShapeDtypeStruct((20, 64), "bfloat16"), jax.ShapeDtypeStruct((5,), "int32")
    for backend in ("mosaic", None):
        traced = jax.make_jaxpr(partial(ragged_linear, backend=backend))(x, w, sizes)
        assert kernels_of(traced.jaxpr)["weight_only_matmul_ragged"] == named


class Replay(Tap):
    def __call__(self, name, value):
        return value + 1 if name == "routes" else value


def test_on_hopper_a_kernel_routes_and_another_has_the_shares_of_edited_routes(monkeypatch):
    """A tap costs nothing. One token takes one launch."""
    monkeypatch.setenv(TARGET, "9.0")
    config = replace(CONFIG, hidden_size=256, experts=Experts(32, 4, 512, layers=()), dtype="bfloat16")
    mlp = abstract_params(config).layers[0].mlp
    for tokens, seen, wanted in (
        (1, Tap(("routes",)), {"route": 1}),
        (8, Tap(()), {"route": 1, "route_rows": 1}),
        (8, Replay(()), {"route": 1, "route_rows": 1, "route_shares": 1}),  # the first two do not run
        (2000, Tap(()), {"route": 1}),
    ):
        x = jax.ShapeDtypeStruct((tokens, 256), jnp.bfloat16)
        for backend in (None, "mosaic", "deterministic"):
            traced = jax.make_jaxpr(partial(mlp_block, config=config, backend=backend, tap=seen))(mlp, x)
            found = kernels_of(traced.jaxpr)
            assert {name: count for name, count in found.items() if name.startswith("route")} == wanted
            alone = tokens <= 8 and backend != "deterministic"  # at most as many rows as experts, which are small
            assert (found["gemv_gated_ragged"], found["gemv_ragged"]) == ((1, 1) if alone else (0, 0))


def test_routes_are_values(model):
    """A tap returns them, and an edit replays others: with routes of its own run it changes nothing."""
    found = tap(model, IDS, ["layers.1.router", "layers.1.routes"])
    routes = np.asarray(found["layers.1.routes"]).reshape(-1, 2)[: len(IDS)]
    scores = np.asarray(found["layers.1.router"]).reshape(-1, 5)[: len(IDS)]
    np.testing.assert_array_equal(routes, np.argsort(-scores, axis=1, kind="stable")[:, :2])
    batch = Packed(*(jnp.asarray(x, jnp.int32) for x in (IDS, range(len(IDS)), [0] * len(IDS))))
    plain = packed_logits(model.params, model.config, batch)

    def replayed(kept: np.ndarray) -> np.ndarray:
        edit = {"layers.1.routes": lambda value, rows: jnp.asarray(kept, jnp.int32)}
        return packed_logits(model.params, model.config, batch, edit)

    np.testing.assert_array_equal(replayed(routes), plain)
    np.testing.assert_allclose(replayed(routes[:, ::-1]), plain, rtol=1e-5, atol=1e-5)
    assert np.abs(replayed((routes + 1) % 5) - plain).max() > 1e-2
    assert "layers.1.routes" in tap_names(2)
    with pytest.raises(EvaluationError, match=r"layers\.0\.routes: this kind of layer has no such value"):
        tap(model, IDS, ["layers.0.routes"])


def test_gradients_are_finite_differences():
    with jax.enable_x64(True):
        m = experts_model("float64")
        batch = Packed(*(jnp.asarray(x, jnp.int32) for x in (IDS, range(len(IDS)), [0] * len(IDS))))

        @jax.jit
        def loss(params):
            logits = packed_logits(params, m.config, batch)
            return -jax.nn.log_softmax(logits)[jnp.arange(len(IDS)), jnp.asarray(IDS)].mean()

        gradient = jax.jit(jax.grad(loss))(m.params)
        rng = np.random.default_rng(1)
        direction = jax.tree.map(lambda x: jnp.asarray(rng.normal(size=x.shape)), m.params)
        slope = sum(jax.tree.leaves(jax.tree.map(lambda g, d: float((g * d).sum()), gradient, direction)))
        moved = [jax.tree.map(lambda x, d, h=h: x + h * d, m.params, direction) for h in (1e-6, -1e-6)]
        assert slope == pytest.approx(float(loss(moved[0]) - loss(moved[1])) / 2e-6, rel=1e-5)


@pytest.mark.parametrize("family", ["mixtral", "olmoe"])
def test_files_may_have_all_experts_as_one_tensor(family, tmp_path):
    """Reads them as transformers 5 has them in memory. What is missing, of odd size, or there twice is named."""
    model = load(PARITY / family)
    c, (first, *_) = model.config, model.params.layers
    shutil.copytree(PARITY / family, tmp_path, dirs_exist_ok=True)
    X, E = c.experts.count, c.hidden_size
    stored = {name: read_as_stored(each) for name, each in stored_tensors(tmp_path).items()}
    kept = {name: each for name, each in stored.items() if ".layers.0." not in name or ".experts." not in name}
    at = "model.layers.0.mlp.experts."
    fused = {
        f"{at}gate_up_proj": first.mlp.gate_up.reshape(X, -1, E),
        f"{at}down_proj": first.mlp.down.reshape(X, E, -1),
    }
    fused = {name: np.asarray(each) for name, each in fused.items()}
    for index in tmp_path.glob("*.index.json"):
        index.unlink()
    for part in tmp_path.glob("*.safetensors"):
        part.unlink()
    write_file(tmp_path / "model.safetensors", kept | fused)
    jax.tree.map(np.testing.assert_array_equal, load(tmp_path).params, model.params)
    few = fused | {f"{at}down_proj": fused[f"{at}down_proj"][:-1]}
    write_file(tmp_path / "model.safetensors", kept | few)
    with pytest.raises(CheckpointError, match=rf"1 of \d+ tensors missing, the first is {at}{X - 1}.down_proj.weight"):
        load(tmp_path)
    odd = np.pad(fused[f"{at}gate_up_proj"], ((0, 0), (0, 1), (0, 0)))
    write_file(tmp_path / "model.safetensors", kept | fused | {f"{at}gate_up_proj": odd})
    with pytest.raises(CheckpointError, match=rf"{2 * X} of \d+ tensors missing, the first is {at}0.gate_proj.weight"):
        load(tmp_path)
    write_file(tmp_path / "model.safetensors", stored | {f"{at}down_proj": fused[f"{at}down_proj"]})
    with pytest.raises(CheckpointError, match=f"1 tensor that its config has no use for, the first is {at}down_proj"):
        load(tmp_path)
    write_file(tmp_path / "model.safetensors", kept)
    with pytest.raises(CheckpointError, match=rf"{3 * X} of \d+ tensors missing, the first is {at}0.gate_proj.weight"):
        load(tmp_path)


def test_adapters_are_of_all_but_experts(tmp_path):
    """On attention, router and the expert that computes every token they are merged weights."""
    with jax.enable_x64(True):
        m = experts_model("float64", replace(EXPERTS, shared_ffn=16, layers=()))
        adapter, rng = init_adapter(m.config, jax.random.key(1), 2), np.random.default_rng(0)
        adapter = {name: replace(each, b=rng.normal(size=each.b.shape)) for name, each in adapter.items()}
        assert set(adapter) == {"qkv", "o", "router", "shared_gate", "shared_gate_up", "shared_down"}
        sampling = [replace(greedy(8), adapter=name) for name in ("a", None)]
        places = {"adapters": {"a": adapter}, "max_adapters": 1, "adapter_rank": 2}
        got = serve(m, [IDS, IDS], sampling, **one_size(2, tokens=12), **places)
        merged = replace(m, params=merge_params(m.params, m.config, adapter))
        want = [serve(each, [IDS], [greedy(8)], **one_size(2, tokens=12))[0] for each in (merged, m)]
    assert [each.token_ids for each in got] == [each.token_ids for each in want]
    assert got[0].token_ids != got[1].token_ids
    assert set(choose_targets(m.config, ["down_proj"])) == {"shared_down"}
    both = replace(m.config, experts=replace(m.config.experts, layers=(False, True)))
    assert set(choose_targets(both, ["gate_proj"])) == {"gate_up", "shared_gate_up"}
    with pytest.raises(ConfigError, match="adapter target 'up_proj': experts take no adapters; the model has q_proj"):
        init_adapter(
            experts_model(experts=replace(EXPERTS, layers=())).config, jax.random.key(1), 2, targets=["up_proj"]
        )
    save_adapter(tmp_path, {"qkv": adapter["qkv"]}, m.config)
    factors = {f"{PREFIX}model.layers.1.mlp.experts.0.up_proj.lora_{x}.weight": np.ones((2, 2), "f") for x in "AB"}
    write_file(tmp_path / WEIGHTS, factors)
    with pytest.raises(CheckpointError, match="changes model.layers.1.mlp.experts.0.up_proj, and experts take no adap"):
        load_adapter(tmp_path, m.config)


@pytest.mark.parametrize("backend", ["xla", "deterministic"])
def test_outputs_are_added_in_the_order_of_experts(model, backend):
    """To the bit, whichever route comes first. Shares are powers of two, so that only sums round."""
    mlp, x = model.params.layers[1].mlp, jax.random.normal(jax.random.key(0), (40, 32))
    routes = np.stack([np.random.default_rng(i).permutation(5)[:3] for i in range(40)]).astype(np.int32)
    shares = np.asarray([[0.5, 0.25, 0.125]] * 40, np.float32)
    run = jax.jit(lambda routes, shares: run_experts(mlp, x, routes, shares, backend=backend))
    each = [np.asarray(run(np.full((40, 1), i, np.int32), np.ones((40, 1), np.float32))) for i in range(5)]
    want, backwards = np.zeros((40, 32), np.float32), np.zeros((40, 32), np.float32)
    for t in range(40):
        for i in sorted(range(3), key=lambda i: routes[t, i]):
            want[t] += shares[t, i] * each[routes[t, i]][t]
        for i in sorted(range(3), key=lambda i: -routes[t, i]):
            backwards[t] += shares[t, i] * each[routes[t, i]][t]
    assert (want != backwards).any()
    np.testing.assert_array_equal(run(routes, shares), want)
    np.testing.assert_array_equal(run(routes[:, ::-1], shares[:, ::-1]), want)


@pytest.mark.parametrize("scheme", [None, "w8a8", "w4a16-g32", "mxfp4-weight", "nf4"])
def test_a_step_has_no_copy_of_the_experts(scheme):
    """Nor their values, where they are codes: what a few tokens take is less than four bits a weight."""
    config = replace(CONFIG, hidden_size=256, experts=Experts(32, 4, 512, layers=()), dtype="bfloat16")
    params = abstract_params(config)
    mlp = (params if scheme is None else quantize(params, scheme)).layers[0].mlp
    x = jax.ShapeDtypeStruct((8, 256), jnp.bfloat16)
    step = jax.jit(partial(mlp_block, config=config, backend="xla", tap=Tap(())))
    memory = step.lower(mlp, x).compile().memory_analysis()
    assert memory.temp_size_in_bytes < 32 * 3 * 512 * 256 / 2


@pytest.mark.parametrize("scheme", [None, "w8a8", "w4a16-g32"])
def test_experts_without_tokens_are_not_read(model, scheme):
    """A route that names no expert computes nothing, nor do two. An expert that is named twice computes twice."""
    mlp = (model.params if scheme is None else quantize(model.params, scheme)).layers[1].mlp
    x = jax.random.normal(jax.random.key(0), (7, 32))
    routes = np.asarray([[4, 1]] * 3 + [[1, 1], [-1, -1], [-1, -1], [-1, 4]], np.int32)
    shares = shares_of(x @ mlp.router.T, routes, EXPERTS.normalize)

    def spoiled(w):
        """The weight with NaN, or wrong codes with NaN scales, in the rows of experts 0, 2 and 3."""
        rows = np.isin(np.arange(w.shape[0]) // (w.shape[0] // 5), [0, 2, 3])
        if scheme is None:
            return jnp.where(rows[:, None], jnp.nan, w)
        rows = np.pad(rows, (0, w.scales.shape[-1] - len(rows)))
        return replace(w, scales=jnp.where(rows, jnp.nan, w.scales))

    bad = replace(mlp, gate_up=spoiled(mlp.gate_up), down=spoiled(mlp.down))
    got, want = (run_experts(p, x, routes, shares, backend="xla") for p in (bad, mlp))
    assert np.isfinite(want).all()
    np.testing.assert_array_equal(got, want)
    assert shares[6].tolist() == [0, 1]
    assert not want[4:6].any()
    once = run_experts(mlp, x, np.asarray([[1, -1]] * 7, np.int32), np.asarray([[1, 0]] * 7, np.float32), backend="xla")
    np.testing.assert_allclose(want[3], once[3], rtol=1e-6)


def test_what_cannot_be_is_refused(model):
    for name in ("layers.1.gate_up", "layers.0.router"):  # of the dense layer and of the experts'
        with pytest.raises(ConfigError, match=f"taps: tap {name}: this kind of layer has no such value"):
            Engine(model, taps=(name,), **one_size(3, tokens=12))
    one = Scheme("one", (("*.experts.0.*", "w8a16"),))
    said = r"formats \(0.gate_proj: w8a16, 0.up_proj: w8a16, 1.gate_proj: none, 1.up_proj: none\)"
    with pytest.raises(QuantizationError, match=f"gate_up_proj is one weight, but its modules get different {said}"):
        quantize(model.params, one)
    with pytest.raises(QuantizationError, match=r"pattern '\*.shared_expert.\*' matches no weight; names: model"):
        quantize(model.params, replace(one, rules=(("*.shared_expert.*", "w8a16"),)))
    for wrong in ({"chosen": 6}, {"ffn": 0}, {"count": 0}):
        with pytest.raises(ConfigError, match="must be at least 1 and at most"):
            replace(EXPERTS, **wrong)
    with pytest.raises(ConfigError, match="3 entries for 2 layers"):
        replace(CONFIG, experts=replace(EXPERTS, layers=(True, False, True)))
