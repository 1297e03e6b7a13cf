"""gpt-oss's experts in MXFP4 are the weights that transformers' formula gives."""

import json
import shutil

import jax
import numpy as np
import pytest
import safetensors.numpy

import jllm
from jllm.errors import CheckpointError
from jllm.model.experts import run_experts
from pallas_kernels.formats.quantized_weights import QuantizedWeight, decode
from tests.parity import PARITY

VALUES = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6], np.float32)
X, E, F = 3, 32, 64


def dequantized(blocks: np.ndarray, scales: np.ndarray) -> np.ndarray:
    """convert_moe_packed_tensors of transformers: [X, inputs, outputs]."""
    values = np.empty((*blocks.shape[:-1], 32), np.float32)
    values[..., 0::2], values[..., 1::2] = VALUES[blocks & 15], VALUES[blocks >> 4]
    values = np.ldexp(values, scales.astype(np.int32)[..., None] - 127)
    return values.reshape(*blocks.shape[:2], -1).swapaxes(1, 2)


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """Returns a model with blocks, and one with their values."""
    rng, found = np.random.default_rng(0), []
    tensors = safetensors.numpy.load_file(PARITY / "gpt-oss" / "model.safetensors")
    tensors = {name: value for name, value in tensors.items() if "layers.1" not in name}
    at = "model.layers.0.mlp.experts."
    blocks, plain = dict(tensors), dict(tensors)
    for name, outputs, inputs in (("gate_up_proj", 2 * F, E), ("down_proj", E, F)):
        del blocks[f"{at}{name}"]
        codes = rng.integers(0, 256, (X, outputs, inputs // 32, 16), np.uint8)
        scales = rng.integers(120, 125, (X, outputs, inputs // 32), np.uint8)
        blocks |= {f"{at}{name}_blocks": codes, f"{at}{name}_scales": scales}
        plain[f"{at}{name}"] = np.ascontiguousarray(dequantized(codes, scales))
        bias = rng.normal(size=(X, outputs)).astype(np.float32)
        blocks[f"{at}{name}_bias"] = plain[f"{at}{name}_bias"] = bias
    raw = json.loads((PARITY / "gpt-oss" / "config.json").read_text())
    raw |= {"intermediate_size": F, "num_hidden_layers": 1, "layer_types": ["sliding_attention"]}
    method = {"quant_method": "mxfp4", "modules_to_not_convert": ["model.layers.*.self_attn", "lm_head"]}
    for each, more in ((blocks, {"quantization_config": method}), (plain, {})):
        folder = tmp_path_factory.mktemp("gpt-oss")
        safetensors.numpy.save_file(each, folder / "model.safetensors")
        (folder / "config.json").write_text(json.dumps(raw | more))
        found.append(folder)
    return found


def test_blocks_are_their_values(folders):
    of_blocks, plain = (jllm.load(folder).params.layers[0].mlp for folder in folders)
    for name in ("gate_up", "down"):
        w = getattr(of_blocks, name)
        assert isinstance(w, QuantizedWeight)
        assert w.format.name == "mxfp4-weight"
        np.testing.assert_array_equal(decode(w), getattr(plain, name))
    x = jax.random.normal(jax.random.key(0), (9, E))
    routes = np.asarray([[i % X, (i + 1) % X] for i in range(9)], np.int32)
    biases = plain.gate_up_bias, plain.down_bias
    got, want = (run_experts(p, x, routes, np.full((9, 2), 0.5), biases, backend="xla") for p in (of_blocks, plain))
    np.testing.assert_allclose(got, want, rtol=1e-4, atol=1e-5)


def test_blocks_without_scales_are_refused(folders, tmp_path):
    shutil.copytree(folders[0], tmp_path, dirs_exist_ok=True)
    tensors = safetensors.numpy.load_file(tmp_path / "model.safetensors")
    del tensors["model.layers.0.mlp.experts.down_proj_scales"]
    safetensors.numpy.save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(CheckpointError, match=r"missing, by its quantization_config, the first is .*down_proj_scales"):
        jllm.load(tmp_path)


def test_the_block_is_the_formula(folders):
    """Computes one token and one expert at a time in numpy, with gates and ups beyond the clamp."""
    p = jllm.load(folders[1]).params.layers[0].mlp
    x = 9 * np.asarray(jax.random.normal(jax.random.key(0), (9, E)))
    routes = np.asarray([[i % X, (i + 1) % X] for i in range(9)], np.int32)
    shares = np.asarray(jax.random.uniform(jax.random.key(1), (9, 2)))
    got = run_experts(p, x, routes, shares, (p.gate_up_bias, p.down_bias), backend="xla")
    gate_up, down = (np.asarray(w, np.float64) for w in (p.gate_up, p.down))
    first, second = np.asarray(p.gate_up_bias).reshape(X, 2, F), np.asarray(p.down_bias).reshape(X, E)
    clamped = 0
    for t, row in enumerate(x):
        want = np.zeros(E)
        for i, share in zip(routes[t], shares[t]):
            gate, up = gate_up.reshape(X, 2, F, E)[i] @ row + first[i]
            clamped += (gate > 7).sum() + (abs(up) > 7).sum()
            gate, up = np.minimum(gate, 7), np.clip(up, -7, 7)
            want += share * (down.reshape(X, E, F)[i] @ (gate / (1 + np.exp(-1.702 * gate)) * (up + 1)) + second[i])
        np.testing.assert_allclose(got[t], want, rtol=1e-4, atol=1e-3)
    assert clamped > 20
