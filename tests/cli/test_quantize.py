"""--quantize, end to end."""

import json

import pytest

import jllm
from jllm.checkpoint import save
from jllm.quant.quantize import quantize, weight_formats

GREEDY = ("--temperature", 0, "--max-new-tokens", 6, "--json", "the king")


def text(run, *flags, **options) -> dict:
    status, out, err = run(*flags, *GREEDY, **options)
    assert status == 0, err
    return json.loads(out)


@pytest.mark.parametrize("scheme", ["w8a8", "uint8-zp"])
def test_presets(run, model, scheme):
    """The same tokens as the library gives."""
    got = text(run, "--quantize", scheme)
    quantized = jllm.Model(model.config, quantize(model.params, scheme), model.tokenizer)
    greedy = jllm.SamplingParams(temperature=0, max_new_tokens=6)
    want = jllm.generate(quantized, "the king", greedy, max_slots=4, max_step_tokens=32)[0]
    assert got["token_ids"] == list(want.token_ids)


def test_a_file_of_rules_and_a_checkpoint_that_is_quantized(run, folder, model, tmp_path):
    rules = tmp_path / "mine.toml"
    rules.write_text('rules = [["layers.0.mlp.*", "w8a16"], ["lm_head", "w8a8"]]')
    got = text(run, "--quantize", rules)
    assert got["settings"]["quantize"] == str(rules)
    params = jllm.load(folder, quantize=rules).params
    assert {fmt.name for fmt in weight_formats(params).values()} == {"w8a16", "w8a8"}
    save(tmp_path / "saved", params, model.config)
    for file in folder.glob("tokenizer*"):
        (tmp_path / "saved" / file.name).write_bytes(file.read_bytes())
    assert text(run, model=tmp_path / "saved")["token_ids"] == got["token_ids"]


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ('rules = [["o_prj", "nf4"]]', "pattern 'o_prj' matches no weight; near ones: o_proj"),
        ('rules = [["o_proj", "w4a16-g128"]]', "model.layers.0.self_attn.o_proj: w4a16-g128 cannot hold shape"),
        ("rules = 3", "a scheme needs rules = [[pattern, format], ...]"),
    ],
)
def test_schemes_that_do_not_fit(run, tmp_path, content, words):
    rules = tmp_path / "mine.toml"
    rules.write_text(content)
    status, out, err = run("--quantize", rules, *GREEDY)
    assert (status, out) == (2, "")
    assert err.startswith("error: ")
    assert words in err
    assert err.count("\n") == 1
