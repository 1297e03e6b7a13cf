"""Schemes as data: which weight becomes what, files of them, and mistakes in them."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from jllm.cli.arguments import SCHEMES
from jllm.errors import QuantizationError
from jllm.model.param_specs import param_specs
from jllm.model.params import matrix_modules
from jllm.quant.schemes import PRESETS, Scheme, find_scheme, scheme_of, wide_rules
from pallas_kernels.formats.weight_formats import parse_weight_format
from tests.tiny import CONFIG

pytest.importorskip("hypothesis")
from hypothesis import given  # noqa: E402
from hypothesis import strategies as st  # noqa: E402

LAYER = "model.layers.1."
LINEARS = ["self_attn.qkv_proj", "self_attn.o_proj", "mlp.gate_up_proj", "mlp.down_proj"]


def modules(layers: int) -> dict[str, tuple[str, ...]]:
    return matrix_modules(param_specs(replace(CONFIG, num_layers=layers)))


def names(scheme: Scheme, layers: int = 2) -> dict[str, list[str]]:
    """The formats' names of every weight that a rule matches."""
    return {weight: [fmt.name for fmt in formats] for weight, formats in scheme.formats(modules(layers)).items()}


@pytest.mark.parametrize("name", PRESETS)
def test_presets(name):
    found = names(find_scheme(name))
    if name == "bf16":
        assert not any(found.values())
        return
    assert found.keys() & {"lm_head", "model.embed_tokens"} == ({"lm_head"} if name == "w8a8-head" else set())
    kept_o = name in ("w8a8", "w8a8-tensor")
    wanted = "w8a8" if name in ("w8a8-all", "w8a8-head", "w8a8-groups") else name
    for layer in ("model.layers.0.", LAYER):
        for linear in LINEARS:
            own = "w8a8-act-g128" if name == "w8a8-groups" and linear.endswith(("o_proj", "down_proj")) else wanted
            assert found[layer + linear][:1] == ([] if kept_o and linear == "self_attn.o_proj" else [own])


def test_help_and_presets_agree():
    """The help's text is written out, since it must not import JAX."""
    told = SCHEMES.replace("(", ",").replace(";", ",").replace(":", ",")
    words = {word.strip() for word in told.split(",")}
    assert {name for name in PRESETS if not name.endswith("-zp") or name == "uint8-zp"} <= words


@pytest.mark.parametrize(
    ("pattern", "matched"),
    [
        ("o_proj", ["self_attn.o_proj"]),
        ("self_attn.*", LINEARS[:2]),
        ("*_proj", LINEARS),
        ("*.mlp.*", LINEARS[2:]),
        ("model.layers.1.mlp.down_proj.weight", ["mlp.down_proj"]),
        ("layers.*.gate_up_proj", ["mlp.gate_up_proj"]),
        ("layers.*.self_attn.o_proj", ["self_attn.o_proj"]),
        ("q_proj|k_proj", []),
        ("down_*", ["mlp.down_proj"]),
    ],
)
def test_patterns(pattern, matched):
    if not matched:
        with pytest.raises(QuantizationError, match="matches no weight"):
            names(Scheme("x", ((pattern, "nf4"),)))
        return
    found = names(Scheme("x", ((pattern, "nf4"),)))
    assert [linear for linear in LINEARS if LAYER + linear in found] == matched


def test_the_first_rule_that_matches_wins():
    scheme = Scheme("x", (("layers.1.*", "bf16"), ("mlp.*", "nf4"), ("*_proj", "w8a16"), ("lm_head", "fp8")))
    found = names(scheme, 11)
    assert found["model.layers.0.mlp.down_proj"] == ["nf4"]
    assert found["model.layers.0.self_attn.o_proj"] == ["w8a16"]
    assert found["model.layers.1.mlp.down_proj"] == []
    assert found["model.layers.10.mlp.down_proj"] == ["nf4"]  # 1 is not the beginning of 10
    assert found["lm_head"] == ["fp8"]
    assert "model.embed_tokens" not in found


def test_hugging_face_modules_of_one_weight():
    together = Scheme(
        "x", (("q_proj", "nf4"), ("k_proj", "nf4"), ("v_proj", "nf4"), ("gate_proj", "fp8"), ("up_*", "fp8"))
    )
    found = names(together)
    assert found[LAYER + "self_attn.qkv_proj"] == ["nf4"]
    assert found[LAYER + "mlp.gate_up_proj"] == ["fp8"]
    with pytest.raises(QuantizationError, match=r"qkv_proj is one weight.*q_proj: none, k_proj: none, v_proj: nf4"):
        names(Scheme("x", (("v_proj", "nf4"),)))


text = st.text(st.characters(exclude_categories=["Cs"]), max_size=12)


@given(name=text, patterns=st.lists(text, max_size=3))
def test_files_say_the_same(tmp_path_factory, name, patterns):
    scheme = Scheme(name, tuple((pattern, "w4a16-g64|nf4") for pattern in patterns))
    folder = tmp_path_factory.mktemp("schemes")
    for suffix, written in ((".toml", scheme.to_toml()), (".json", scheme.to_json())):
        file = folder / f"mine{suffix}"
        file.write_text(written, encoding="utf-8", newline="")
        assert find_scheme(file) == scheme
        assert find_scheme(str(file)) == scheme


def test_the_scheme_of_the_page(tmp_path):
    page = (Path(__file__).parent.parent.parent / "docs" / "quantization.md").read_text(encoding="utf-8")
    file = tmp_path / "half.toml"
    file.write_text(page.partition("```toml\n")[2].partition("```")[0], encoding="utf-8")
    found = names(find_scheme(file))
    assert found["model.layers.0.mlp.down_proj"] == found["model.layers.0.self_attn.o_proj"] == []
    assert found[LAYER + "mlp.down_proj"] == ["w4a16-g64"]
    assert found[LAYER + "self_attn.o_proj"] == ["w8a16"]
    assert found["lm_head"] == ["w8a8"]
    assert LAYER + "self_attn.qkv_proj" not in found


@pytest.mark.parametrize(
    ("rules", "wide"),
    [
        ([["*", "nf4"]], {"*": ["embed_tokens", "lm_head"]}),
        ([["lm_head", "bf16"], ["*", "nf4"]], {"*": ["embed_tokens"]}),
        ([["model.*", "nf4"]], {"model.*": ["embed_tokens"]}),
        ([["embed_tokens", "bf16"], ["lm_head", "w8a8"], ["*", "nf4"]], {}),
        ([["*_proj", "nf4"], ["lm_head", "w8a8"], ["embed_tokens", "nf4"]], {}),
        ([["*", "bf16"]], {}),
    ],
)
def test_rules_that_take_embedding_and_head_with_the_layers_are_known(rules, wide):
    assert wide_rules(Scheme.from_dict({"rules": rules})) == wide


def test_a_file_without_a_name_is_called_as_the_file_is(tmp_path):
    (tmp_path / "half.toml").write_text('rules = [["mlp.*", "nf4"]]')
    assert find_scheme(tmp_path / "half.toml") == Scheme("half", (("mlp.*", "nf4"),))


def test_any_format_is_a_scheme_for_the_linear_layers():
    assert names(find_scheme("nf4-g128"))[LAYER + "self_attn.o_proj"] == ["nf4-g128"]


@pytest.mark.parametrize(
    ("scheme", "words"),
    [
        ("w8a9", ["'w8a9'", "near ones: w8a8"]),
        ("w8a8-talk", ["'w8a8-talk' is gone: use 'w8a8'"]),
        ("zebra", ["'zebra'", "schemes: bf16, w8a16"]),
        ("", ["''", "schemes: bf16, w8a16"]),
        ("NF4 ", ["'NF4 '", "near ones: nf4, nf4-dq"]),
        ("int8", ["near ones: w8a16, w8a8, w8a8-all,"]),
        ("w4a16", ["near ones: w4a16-g128, w4a16-g64, w4a16-g32,"]),
        (7, ["not 7"]),
        ("none/such.toml", ["none/such.toml: cannot be read"]),
    ],
)
def test_unknown_schemes(scheme, words):
    refuse(words, lambda: find_scheme(scheme))


@pytest.mark.parametrize(
    ("rules", "words"),
    [
        ([["o_prj", "nf4"]], ["'o_prj' matches no weight", "near ones: o_proj"]),
        ([["layers.7.mlp.down_proj", "nf4"]], ["'layers.7.mlp.down_proj'", "mlp.down_proj"]),
        ([["O_PROJ", "nf4"]], ["'O_PROJ' matches no weight", "near ones: o_proj"]),
        ([["self_attn", "nf4"]], ["'self_attn' matches no weight; all below it: 'self_attn.*'"]),
        ([["layers.1", "nf4"]], ["'layers.1' matches no weight; all below it: 'layers.1.*'"]),
        ([["zebra", "nf4"]], ["'zebra'", "names: model.embed_tokens", "lm_head"]),
        ([["o_proj", "nf5"]], ["rule 'o_proj'", "'nf5'", "w4a16-gN"]),
        ([["o_proj", "nf4|nf5"]], ["rule 'o_proj'", "'nf5'"]),
        (
            [["*_proj", "nf4"], ["o_proj", "bf16"]],
            ["'o_proj' matches only names that '*_proj' before it", "put it earlier"],
        ),
        ([["o_proj", "nf4"], ["self_attn.o_proj", "nf4"]], ["'self_attn.o_proj' matches only names that 'o_proj'"]),
        (
            [["layers.0.*", "nf4"], ["layers.1.*", "fp8"], ["mlp.*", "w8a16"]],
            ["'mlp.*' matches only names that 'layers.0.*', 'layers.1.*' before it"],
        ),
        ([["qkv_proj", "nf4"], ["v_proj", "fp8"]], ["'v_proj' matches only names that 'qkv_proj'"]),
    ],
)
def test_rules_that_do_not_fit(rules, words):
    refuse(words, lambda: Scheme.from_dict({"name": "mine", "rules": rules}).formats(modules(2)))


@pytest.mark.parametrize(
    ("suffix", "content", "words"),
    [
        (".toml", "rules = [", ["not valid TOML"]),
        (".json", "{", ["not valid JSON"]),
        (".json", "[]", ["list"]),
        (".json", json.dumps({"rules": [["a"]]}), ["rules = [[pattern, format], ...]"]),
        (".json", json.dumps({"rules": [["a", 4]]}), ["rules = [[pattern, format], ...]"]),
        (".json", json.dumps({"name": "x"}), ["rules = [[pattern, format], ...]"]),
        (".toml", 'rules = []\nignore = ["lm_head"]', ["unknown key 'ignore'"]),
    ],
)
def test_files_that_are_no_schemes(tmp_path, suffix, content, words):
    file = tmp_path / f"mine{suffix}"
    file.write_text(content)
    refuse([str(file), *words], lambda: find_scheme(file))


@pytest.mark.parametrize("name", PRESETS)
def test_formats_of_weights_give_their_scheme_back(name):
    """What a saved checkpoint says of itself; a preset where it is one."""
    scheme = PRESETS[name]
    formats = {weight: found[-1] for weight, found in scheme.formats(modules(3)).items() if found}
    again = scheme_of(formats, modules(3))
    assert {weight: found for weight, found in again.formats(modules(3)).items() if found} == {
        weight: (fmt,) for weight, fmt in formats.items()
    }
    assert again.name in ("bf16", "w8a8", "w8a8-all", *(fmt.name for fmt in formats.values()), name)


def test_mixed_formats_give_rules_of_their_own():
    nf4, fp8 = parse_weight_format("nf4"), parse_weight_format("fp8")
    formats = {"model.layers.0.mlp.down_proj": nf4, "model.layers.1.mlp.down_proj": nf4, "lm_head": fp8}
    formats["model.layers.1.self_attn.o_proj"] = fp8
    scheme = scheme_of(formats, modules(2))
    assert {weight: found[0] for weight, found in scheme.formats(modules(2)).items() if found} == formats
    assert ("model.layers.*.mlp.down_proj", "nf4") in scheme.rules
    assert scheme.name == "mixed"


def refuse(words, call):
    with pytest.raises(QuantizationError) as error:
        call()
    message = str(error.value)
    assert "\n" not in message
    assert all(word in message for word in words), message
