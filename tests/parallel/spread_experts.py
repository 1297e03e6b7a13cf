"""A Mixture of Experts on a mesh: each device has some experts, or some columns of each, and tokens are as on one."""

from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jllm
from experiments.steps.timer import random_params
from jllm.config import Experts
from jllm.engine.engine import Engine
from jllm.engine.request import SamplingParams
from jllm.errors import ConfigError, QuantizationError
from jllm.files import fingerprint
from jllm.files.save import save
from jllm.model.adapters import init_adapter
from jllm.model.backbone import Packed, packed_logits, tapped_backbone
from jllm.model.mlp import mlp_block
from jllm.model.model import Model
from jllm.model.param_specs import init_params
from jllm.model.shards import share_params, whole_params
from jllm.model.taps import Tap
from jllm.parallel.mesh import fitting, has_whole_experts, make_mesh, spread
from jllm.quant.quantize import quantize
from jllm.speculative.ngram import NGram
from jllm.step.buckets import Bucket
from tests.parallel.meshes import SIZES
from tests.parity import PARITY
from tests.tiny import CONFIG, serve

jax.config.update("jax_enable_x64", True)
EXPERTS = Experts(count=8, chosen=3, ffn=64, layers=(False, True))
TOKENS = jnp.arange(20, dtype=jnp.int32) * 3 % 97
BATCH = Packed(TOKENS, jnp.arange(20, dtype=jnp.int32), jnp.zeros(20, jnp.int32))
PROMPTS = [[5, 6, 7, 8, 9, 10, 11, 12, 13, 14], [3, 1, 4, 1, 5], [5, 6, 7, 8, 9, 10, 11, 12, 20, 21]]
ASKED = [
    SamplingParams(temperature=0.0, max_new_tokens=10, ignore_eos=True),
    SamplingParams(temperature=1.0, max_new_tokens=10, seed=3, ignore_eos=True),
    SamplingParams(temperature=0.8, top_k=9, top_p=0.9, max_new_tokens=10, seed=4, ignore_eos=True),
]
ENGINE = {"max_slots": 3, "page_size": 8, "max_step_tokens": 8, "buckets": (Bucket(3, 5, 3),)}
forward = partial(jax.jit, static_argnums=1)(packed_logits)


def model_of(dtype: str = "float64", experts: Experts = EXPERTS, seed: int = 0, **changes) -> Model:
    """A dense layer and one of experts, unless `experts` has others; no vector is all ones or zeros."""
    config = replace(CONFIG, dtype=dtype, experts=experts, **(SIZES | changes))
    params = init_params(config, jax.random.key(seed))
    rng = np.random.default_rng(seed)

    def sharp(leaf: jax.Array) -> jax.Array:
        return leaf * 10 if leaf.ndim > 1 else leaf + jnp.asarray(0.5 * rng.normal(size=leaf.shape), leaf.dtype)

    return Model(config, jax.tree.map(sharp, params))


def on_mesh(model: Model, devices: int, whole: bool | None = None) -> Model:
    config = spread(replace(model.config, expert_parallel=whole), make_mesh(devices))
    return replace(model, config=config, params=share_params(model.params, config))


def tokens(model: Model, **options) -> list[tuple[int, ...]]:
    return [done.token_ids for done in serve(model, PROMPTS, ASKED, **(ENGINE | options))]


KINDS = {
    "plain": replace(EXPERTS, normalize=False),
    "shared": replace(EXPERTS, shared_ffn=64),
    "biases": replace(EXPERTS, biases=True),
}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("devices", "whole"), [(8, True), (2, False)])
def test_logits_are_those_of_one_device(kind, devices, whole):
    model = model_of(experts=KINDS[kind])
    spread_out = on_mesh(model, devices, whole)
    assert has_whole_experts(spread_out.config) == whole
    got, wanted = (forward(m.params, m.config, BATCH) for m in (spread_out, model))
    np.testing.assert_allclose(got, wanted, rtol=0, atol=1e-10 * float(jnp.abs(wanted).max()))


def test_16_bits_are_rounded_once():
    """The exchange is in float32, as the sum over a token's experts is on one device."""
    model = model_of("bfloat16")
    spread_out = on_mesh(model, 8)
    taps = ("layers.1.middle", "layers.1.output")
    one, all_of_them = (
        tapped_backbone(m.params, m.config, BATCH, None, taps, backend="xla")[2] for m in (model, spread_out)
    )
    assert all_of_them[taps[1]].dtype == jnp.bfloat16
    mlp, x = model.params.layers[1].mlp, all_of_them[taps[0]]
    want = mlp_block(mlp, x, config=model.config.one_layer(1), backend="xla", tap=Tap(()))
    assert (all_of_them[taps[1]] == want).mean() > 0.99
    assert one[taps[1]].dtype == jnp.bfloat16


def test_one_exchange_sums_the_experts():
    two = on_mesh(model_of(experts=replace(EXPERTS, layers=())), 2)
    said = str(jax.make_jaxpr(packed_logits, static_argnums=1)(two.params, two.config, BATCH))
    assert said.count("psum") == 3, "two in the one layer that all call, and one of the embedding"
    assert said.count("all_gather[") == 1


@pytest.mark.parametrize(("scheme", "devices", "whole"), [(None, 8, None), ("w4a16-g32", 2, False)])
def test_tokens_are_those_of_one_device(scheme, devices, whole):
    """Prefixes are found again, drafts are accepted, and requests give up their pages."""
    model = model_of()
    if scheme is not None:
        model = replace(model, params=quantize(model.params, scheme))
    wanted = tokens(model)
    spread_out = on_mesh(model, devices, whole)
    few = {"num_pages": 6, "speculate": NGram(drafts=2, shortest=1), "buckets": (Bucket(3, 5, 3), Bucket(2, 0, 0, 3))}
    engine = Engine(spread_out, **(ENGINE | few), deterministic=True)
    for _ in range(2):
        ids = [engine.submit(prompt, params) for prompt, params in zip(PROMPTS, ASKED)]
        done = {event.id: event.completion.token_ids for event in engine.run() if event.completion}
        assert [done[i] for i in ids] == wanted
    metrics = engine.metrics()
    assert metrics["preemptions"] > 0 < metrics["prefix_hit_tokens"]
    assert metrics["draft_tokens_mean"] > 0


@pytest.mark.parametrize("whole", [True, False])
def test_deterministic_activations_have_a_scale_a_row(whole):
    model = model_of()
    model = replace(model, params=quantize(model.params, "w8a8"))
    one = jax.jit(partial(packed_logits, backend="deterministic"), static_argnums=1)
    got, wanted = (one(m.params, m.config, BATCH) for m in (on_mesh(model, 2, whole), model))
    np.testing.assert_allclose(got, wanted, rtol=0, atol=1e-10 * float(jnp.abs(wanted).max()))


def test_pages_of_rounded_inputs_are_of_one_way_to_share_experts():
    model = model_of()
    for each, equal in ((model, True), (replace(model, params=quantize(model.params, "w8a8")), False)):
        shared = (on_mesh(each, 2, whole) for whole in (True, False))
        one, other = (fingerprint.of_model(m.params, m.config) for m in shared)
        assert (one == other) == equal


def test_updates_snapshots_and_adapters():
    model, other = model_of(), model_of(seed=1)
    spread_out = on_mesh(model, 4)
    adapter = init_adapter(model.config, jax.random.key(2), 2, targets=["q_proj", "o_proj"])
    adapter = {name: replace(each, b=each.b + 0.3) for name, each in adapter.items()}
    options = ENGINE | {"max_adapters": 1, "adapter_rank": 2, "adapters": {"a": adapter}}
    asked, found = replace(ASKED[0], adapter="a"), []
    for m in (model, spread_out):
        engine = Engine(m, **options)
        request = engine.submit(PROMPTS[0], asked)
        while not (events := engine.step()) or len(events[-1].token_ids) == 0:
            pass
        snapshot = engine.snapshot(request)
        first = [event.completion.token_ids for event in engine.run() if event.completion]
        engine.update(share_params(other.params, m.config))
        engine.submit(PROMPTS[1], ASKED[0])
        found.append((first, [event.completion.token_ids for event in engine.run() if event.completion], snapshot))
    assert found[0][:2] == found[1][:2]
    assert found[1][1][0] == serve(other, [PROMPTS[1]], [ASKED[0]], **ENGINE)[0].token_ids != found[1][0][0]
    engine = Engine(model, **options)
    engine.resume(found[1][2], replace(asked, max_new_tokens=10 - len(found[1][2].tokens) + len(PROMPTS[0])))
    (last,) = [event.completion for event in engine.run() if event.completion]
    assert last.token_ids == found[0][0][0][len(found[1][2].tokens) - len(PROMPTS[0]) :]


def test_no_device_gets_experts_of_others(tmp_path, monkeypatch):
    """However a model is loaded: as it is stored, quantized here, stored in codes."""
    model = model_of("float32", replace(EXPERTS, layers=()), architecture="MixtralForCausalLM", intermediate_size=64)
    save(tmp_path / "plain", model.params, model.config)
    save(tmp_path / "codes", quantize(model.params, "w4a16-g32"), model.config)
    put, most = jax.device_put, 2 * EXPERTS.ffn * EXPERTS.count // 4  # rows of gates and ups of two experts

    def counted(tree, *where, **more):
        for leaf in jax.tree.leaves(tree):
            assert getattr(leaf, "ndim", 0) < 2 or leaf.shape[0] <= most, f"{leaf.shape} goes to a device"
        return put(tree, *where, **more)

    for folder, scheme in (("plain", None), ("plain", "w4a16-g32"), ("codes", None)):
        wanted = jllm.load(tmp_path / folder, quantize=scheme)
        with monkeypatch.context() as patch:
            patch.setattr(jax, "device_put", counted)
            found = jllm.load(tmp_path / folder, quantize=scheme, mesh=4)
        own = jax.tree.leaves(found.params.layers[1].mlp.gate_up)
        assert all(part.data.shape[1] in (most, 2) for leaf in own for part in leaf.addressable_shards)
        shared = share_params(wanted.params, found.config)
        jax.tree.map(np.testing.assert_array_equal, found.params, shared)
        assert fingerprint.of_shares(found.params, found.config) == fingerprint.of_params(wanted.params)
        jax.tree.map(np.testing.assert_array_equal, whole_params(found.params, found.config), wanted.params)


def test_what_a_mesh_saves_is_the_whole_model(tmp_path):
    model = model_of("float32", replace(EXPERTS, layers=()), architecture="MixtralForCausalLM", intermediate_size=64)
    spread_out = on_mesh(model, 4, whole=True)
    save(tmp_path, spread_out.params, spread_out.config)
    found = jllm.load(tmp_path)
    assert found.config == model.config
    assert fingerprint.of_params(found.params) == fingerprint.of_params(model.params)


@pytest.mark.parametrize(
    ("family", "devices", "changes"), [("gpt-oss", 2, {}), ("olmoe", 4, {}), ("olmo2", 4, {"norm_offset": 0.5})]
)
def test_heads_have_their_sinks_and_norms_of_all(family, devices, changes):
    """Four devices have two KV heads twice."""
    model = jllm.load(PARITY / family, dtype="float64")
    model = replace(model, config=replace(model.config, **changes))
    shared = on_mesh(model, devices)
    got, wanted = (forward(m.params, m.config, BATCH) for m in (shared, model))
    np.testing.assert_allclose(got, wanted, rtol=0, atol=1e-10 * float(jnp.abs(wanted).max()))
    jax.tree.map(np.testing.assert_array_equal, whole_params(shared.params, shared.config), model.params)


def test_norms_of_all_heads_have_one_order():
    """A request alone has the bits that it has in a batch, and the tokens of one device."""
    model = jllm.load(PARITY / "olmoe", dtype="float64")
    shared = on_mesh(model, 4)
    asked = [replace(each, logprobs=3) for each in ASKED]
    many = serve(shared, PROMPTS, asked, **ENGINE, deterministic=True)
    lone = ENGINE | {"max_slots": 1, "max_step_tokens": 20, "buckets": (Bucket(1, 19, 1),)}  # steps of another shape
    (alone,) = serve(shared, PROMPTS[1:2], asked[1:2], **lone, deterministic=True)
    assert [done.token_ids for done in many] == [done.token_ids for done in serve(model, PROMPTS, asked, **ENGINE)]
    assert alone.logprobs == many[1].logprobs


def test_random_shares_have_one_router():
    """And experts of their own."""
    config = on_mesh(model_of("float32"), 4).config
    router, down = (getattr(random_params(config, "float32").layers[1].mlp, name) for name in ("router", "down"))
    assert (router.shape, down.shape) == ((4, 8, 64), (4, 2 * 64, 64))
    assert all((part == router[0]).all() for part in router)
    assert len({float(part.sum()) for part in down}) == 4


def test_what_does_not_fit():
    config = replace(CONFIG, experts=replace(EXPERTS, count=6, layers=()), **(SIZES | {"intermediate_size": 7}))
    assert [fitting(replace(config, expert_parallel=how)) for how in (None, True, False)] == [
        [1, 2, 4, 8],
        [1, 2],
        [1, 2, 4, 8],
    ]
    assert not has_whole_experts(spread(config, make_mesh(4)))
    said = "^4 devices cannot share 8 heads, 2 KV heads and 6 experts evenly; these numbers of devices can: 1, 2$"
    with pytest.raises(ConfigError, match=said):
        spread(replace(config, expert_parallel=True), make_mesh(4))
    with pytest.raises(ConfigError, match="and 6 experts or 63 columns of each evenly; these .*: 1, 2$"):
        spread(replace(config, experts=replace(config.experts, ffn=63)), make_mesh(4))
    with pytest.raises(ConfigError, match="expert_parallel=True is for a mixture of experts, not for one MLP"):
        replace(CONFIG, expert_parallel=True)
    with pytest.raises(ConfigError, match=r"says how devices share experts: give a mesh \(--devices\)"):
        jllm.load(PARITY / "mixtral", expert_parallel=False)
    model = model_of("float32")
    model = replace(model, params=quantize(model.params, "w4a16-g64"))
    on_mesh(model, 2)
    with pytest.raises(QuantizationError, match="experts.down_proj: w4a16-g64 has groups of 64, .* 32 would fit"):
        on_mesh(model, 2, whole=False)
