"""Claims about the parts of a step: what they measure, at toy size, and what they judge."""

import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from experiments.claims import c13, c14, c18, c19, c20, c27, c32, shapes, unfused
from experiments.claims.unfused import NAMES, Fusions
from jllm.files.load import load
from jllm.model.backbone import backbone
from jllm.model.cache import make_cache, parse_kv_cache
from jllm.model.model import Model
from tests.tiny import CONFIG, tiny_model


@pytest.fixture
def tiny(monkeypatch) -> None:
    monkeypatch.setattr(shapes, "TOY", shapes.TOY | {"num_layers": 1, "hidden_size": 32, "intermediate_size": 32})


def count(jaxpr, primitive: str) -> int:
    """Counts how often an operation is computed, inner functions included."""
    inner = [value.jaxpr for eqn in jaxpr.eqns for value in eqn.params.values() if hasattr(value, "jaxpr")]
    return sum(eqn.primitive.name == primitive for eqn in jaxpr.eqns) + sum(count(each, primitive) for each in inner)


def test_c13_products_are_those_of_a_step():
    model = tiny_model()
    x = jax.ShapeDtypeStruct((3, CONFIG.hidden_size), jnp.float32)
    made = jax.make_jaxpr(c13.products)(model.params, x, jax.ShapeDtypeStruct((2,), jnp.float32))
    assert made.out_avals[0].shape == (2, CONFIG.vocab_size)
    assert count(made.jaxpr, "dot_general") == 4 * CONFIG.num_layers + 1
    edge = c13.share_row("decode", 1, 8, [(100.0, 90.2), (200.0, 178.0), (50.0, 45.0)])
    assert (edge["step_us"], edge["products_us"], edge["share"], edge["rounds"]) == (116.7, 104.4, 0.8973, 3)
    assert edge["share_ci"] == pytest.approx(0.0160, abs=1e-4)


def test_c13_maps_steps_by_batch_and_context(tiny):
    rows = list(c13.measure(True))
    assert [(row["phase"], row["batch"], row["tokens"]) for row in rows] == [
        ("decode", 2, 8), ("decode", 2, 16), ("prefill", 1, 16)
    ]  # fmt: skip
    assert all(row["rounds"] == c13.ROUNDS and row["share_ci"] > 0 for row in rows)
    assert all(batch * max(contexts) <= 1 << 16 for batch, contexts in c13.DECODE.items()), "what 80 GB hold"


def test_c14_has_the_share_of_each_round(tiny, monkeypatch):
    monkeypatch.setattr(c14.Bench, "prefill", lambda self, case: [1.0, 2.0, 3.0])
    monkeypatch.setattr(c14.Bench, "decode", lambda self, case: [1 / 16, 2 / 16, 1 / 16])
    (row,) = c14.measure(True)
    assert row["prefill_share"] == pytest.approx((0.5 + 0.5 + 0.75) / 3, abs=1e-4)
    assert row["tokens_s"] == pytest.approx(2 * 16 / (2 + 16 * 4 / 48), rel=1e-3)
    assert row["prefill_share_ci"] == pytest.approx(4.3027 * 0.25 / 3, abs=1e-4)  # Student's t of 2, over sqrt(3)


def layers_of(model: Model, phase: str, sequences: int, tokens: int, fusions: Fusions | None):
    """Layers over pages of random K and V: by the claim's own with some fusions, or by the library's."""
    config = model.config
    x, batch = c18.inputs(config, phase, sequences, tokens, jnp.float32)
    cache = make_cache(config, c18.pages_of(batch), c18.PAGE, parse_kv_cache(None, config, jnp.dtype("float32")))
    leaves, tree = jax.tree.flatten(cache)
    keys = jax.random.split(jax.random.key(3), len(leaves))
    cache = jax.tree.unflatten(tree, [jax.random.normal(k, leaf.shape, leaf.dtype) for k, leaf in zip(keys, leaves)])
    if fusions is None:
        return backbone(model.params, config, batch, cache)
    params = tuple((p, unfused.split(p, config)) for p in model.params.layers)
    if phase == "decode":
        x = model.params.embed[batch.tokens]
    return unfused.layers(params, x, batch, cache, config=config, fusions=fusions)


def test_c18_unfused_layers_compute_the_same():
    model = tiny_model(num_layers=1)

    def close(a, b):
        for left, right in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True):
            np.testing.assert_allclose(left, right, rtol=1e-3, atol=1e-4)

    def made(phase, sequences, tokens, fusions):
        return jax.jit(lambda: layers_of(model, phase, sequences, tokens, fusions))()

    close(made("decode", 2, 20, Fusions()), made("decode", 2, 20, None))
    close(made("decode", 2, 20, Fusions(*[True] * 4)), made("decode", 2, 20, None))
    close(made("prefill", 1, 24, Fusions()), made("prefill", 1, 24, Fusions(*[True] * 4)))


def test_c18_each_fusion_takes_barriers_away():
    model = tiny_model(num_layers=1)

    def operations(fusions: Fusions) -> tuple[int, int]:
        """Barriers and products."""
        made = jax.make_jaxpr(lambda: layers_of(model, "decode", 2, 20, fusions))().jaxpr
        return count(made, "optimization_barrier"), count(made, "dot_general")

    none = operations(Fusions())
    assert operations(Fusions(*[True] * 4))[0] == 0
    assert operations(Fusions(projections=True)) == (none[0], none[1] - 3)
    for name in set(NAMES) - {"projections"}:
        assert operations(Fusions(**{name: True}))[0] < none[0]


HLO = """HloModule jit_f, entry_computation_layout={(f32[4]{0})->f32[4]{0}}

%fused (p: f32[4]) -> f32[4] {
  %p = f32[4]{0} parameter(0)
  ROOT %a = f32[4]{0} add(%p, %p)
}

%command_buffer (q: f32[4]) -> f32[4] {
  %q = f32[4]{0} parameter(0)
  %f = f32[4]{0} fusion(%q), kind=kLoop, calls=%fused
  ROOT %g = (f32[4]{0}, s8[16]{0}) custom-call(%f), custom_call_target="__cublas$gemm"
}

ENTRY %main (x: f32[4]) -> f32[4] {
  %x = f32[4]{0} parameter(0)
  %c = f32[4]{0} call(%x), to_apply=%command_buffer
  %t = (f32[4]{0}, f32[4]{0}) tuple(%c, %x)
  ROOT %d = f32[4]{0} fusion(%c), kind=kLoop, calls=%fused
}
"""


def test_c18_counts_what_is_launched():
    assert c18.kernels(HLO) == 3
    lowered = jax.jit(lambda x: jnp.tanh(x) @ x).lower(jax.ShapeDtypeStruct((8, 8), jnp.float32))
    assert c18.kernels(lowered.compile().as_text()) >= 1


def test_c18_leaves_each_fusion_out(tiny, monkeypatch):
    """Each fusion alone, all and none give the same, on two layers."""
    every = c18.VARIANTS
    some = {name: fusions for name, fusions in every.items() if not name.startswith(c18.BUT)}
    monkeypatch.setattr(c18, "VARIANTS", some)
    monkeypatch.setattr(c18, "DEPTHS", (1, 2))
    rows = list(c18.measure(True))
    assert not [row for row in rows if "error" in row]
    assert {row["fused"] for row in rows} == set(some)
    assert {row["round"] for row in rows} == set(range(c18.ROUNDS))
    for name in NAMES:
        without = every[c18.BUT + name]
        assert [each for each in NAMES if not getattr(without, each)] == [name]


def test_c19_parts_add_up():
    row = c19.row_of("prefill", 1, 8, [10.0, 90.0, 10.0, 3.0])
    assert [row[name] for name in c19.PARTS] == pytest.approx([10 / 103, 80 / 103, 10 / 103, 3 / 103], abs=1e-4)
    config = shapes.config_of(True)
    params = jax.eval_shape(lambda: shapes.random_params(config, True))
    tokenizer = load().tokenizer
    host = Model(config, params, tokenizer)
    assert c19.host_us(host, 2, 0, True) > 0
    assert c19.host_us(host, 1, 24, True) > 0
    assert c19.tokenize_us(tokenizer, 24) > 0


def test_c19_reads_what_shows_of_the_host_from_a_trace(tmp_path):
    shares = {"gap": 0.03, "sampling": 0.01, "matmul": 0.5, "rest": 0.46}
    rows = [
        {"batch": 1, "context": 136, "kind": kind, "kernel": "(none)" if kind == "gap" else "(all)", "share": share}
        for kind, share in shares.items()
    ]
    about = {"device": "NVIDIA H200", "command": ""}
    document = about | {"experiment": "step_profile_serve", "rows": [*rows, {"kernel": "sample", "kind": "sampling"}]}
    (tmp_path / "step_profile_serve-20260101-h.json").write_text(json.dumps(document))
    alone = c19.row_of("decode", 1, 256, [0.0, 90.0, 5.0, 5.0])
    document = about | {"experiment": "claims-C19", "rows": [alone, {"how": "overlapped"}]}
    (tmp_path / "claims-C19-20260101-h.json").write_text(json.dumps(document))
    (row,) = c19.overlapped(tmp_path)
    assert (row["compute"], row["sample"], row["return"]) == (0.96, 0.01, 0.03)
    source = {"file": "claims-C19-20260101-h.json", "measured_on": "NVIDIA H200"}
    assert list(c19.recorded(tmp_path)) == [alone | source]


def test_c20_shares_follow_from_weights_and_memory():
    rows = list(c20.measure(True))
    by = {(row["model"], row["kv"], row["device"]): row for row in rows}
    row = by["llama-2-7b", "bf16", "NVIDIA H100 SXM"]
    weights = 6738415616 * 2
    assert row["weights_gib"] == round(weights / 2**30, 1)
    assert row["share"] == pytest.approx(1 - weights / (0.9 * 80e9), abs=1e-3)
    assert row["token_kib"] == 512
    assert by["llama-2-7b", "int8-g8", "NVIDIA H100 SXM"]["sequences"] / row["sequences"] == pytest.approx(
        1.6, rel=0.02
    )
    large = by["176B", "bf16", "NVIDIA H100 SXM"]
    assert (large["devices"], large["share"]) == (8, pytest.approx(1 - 352 / 576, abs=1e-3))
    assert by["176B", "bf16", "NVIDIA L4"]["devices"] is None


def test_c27_counts_what_follows_a_requests_end():
    assert c27.unwanted_share([1, 3, 2, 2], 2) == pytest.approx(2 / 10)  # two batches of 2 x 3 and 2 x 2 for 8 tokens
    assert c27.unwanted_share([1, 3, 2], 2) == pytest.approx(2 / 8)  # the last batch has one member
    assert c27.unwanted_share([5, 1, 9], 1) == 0
    rows = list(c27.measure(True))
    shares = [row["unwanted_shuffled"] for row in rows]
    assert shares == sorted(shares)
    assert all(row["unwanted_low"] <= row["unwanted_shuffled"] <= row["unwanted_high"] for row in rows)


def test_c32_takes_each_measured_step_from_its_newest_file(tmp_path):
    def write(name: str, date: str, ms: float, command: str = "", **more) -> None:
        row = {"model": "llama-2-7b", "batch": 1, "context": 128, "backend": "default", "kv": "bfloat16"}
        document = {"date": date, "device": "H", "command": command, "rows": [row | {"decode_ms": ms} | more]}
        (tmp_path / f"decode_step-{name}.json").write_text(json.dumps(document))

    write("b-20260101-h", "2026-01-01", 9.0)
    write("a-20260102-h", "2026-01-02", 5.0)
    write("two-20260101-h", "2026-01-01", 3.0, devices=2)
    write("few-20260103-h", "2026-01-03", 1.0, command="decode_step --layers 2")
    for at, other in enumerate(({"scheme": "w8a8"}, {"kv": "int8-g8"}, {"backend": "xla"})):
        write(f"other{at}-20260103-h", "2026-01-03", 1.0, **other)
    found = {row["ranks"]: row for row in c32.recorded(tmp_path)}
    assert {ranks: row["ms"] for ranks, row in found.items()} == {1: 5.0, 2: 3.0}
    assert (found[1]["billions"], found[1]["file"]) == (6.7, "decode_step-a-20260102-h.json")
    assert not list(c32.recorded(tmp_path / "none"))
