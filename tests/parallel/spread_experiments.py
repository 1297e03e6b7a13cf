"""Experiments on meshes: decode steps on several numbers of devices, requests a second of engines on meshes, floors."""

import json
import math
from dataclasses import replace
from functools import partial

import jax
import pytest

from experiments import decode_step, qps
from experiments.steps.devices import device_sheet
from experiments.steps.floors import Work, make_floor
from experiments.steps.timer import model_config, random_params
from jllm.errors import ConfigError
from jllm.files.hf_config import load_config
from jllm.model import shards as shares
from jllm.model.shards import share_params
from jllm.parallel.mesh import make_mesh, spread
from jllm.quant.quantize import quantize, weight_formats
from tests.experiments.test_decode_step import TOY
from tests.parallel.meshes import model_of


@pytest.fixture(autouse=True, scope="module")
def narrow():
    """Experiments run as they do by themselves, without the 64 bits of the other files."""
    before = jax.config.jax_enable_x64
    jax.config.update("jax_enable_x64", False)
    yield
    jax.config.update("jax_enable_x64", before)


@pytest.fixture
def toy(tmp_path):
    path = tmp_path / "toy.json"
    path.write_text(json.dumps(TOY | {"num_key_value_heads": 4, "intermediate_size": 128}))
    return path


def rows_of(run, capsys):
    assert run() == 0
    return json.loads(capsys.readouterr().out.splitlines()[-1])


@pytest.mark.parametrize(("scheme", "ranks"), [(None, 8), ("w8a8", 2), ("w4a16-g32", 8)])
def test_the_floor_of_a_mesh_is_that_of_one_device_over_their_number(scheme, ranks):
    """8 devices keep each of the two KV heads four times, which nothing has to read."""
    model = model_of("bfloat16", num_heads=8, head_dim=32, hidden_size=256, intermediate_size=1024, vocab_size=256)
    params = quantize(model.params, scheme) if scheme else model.params
    mesh = spread(model.config, make_mesh(ranks))
    one, shared = (
        make_floor(share_params(params, config), config, device_sheet("h100-sxm").ceilings)
        for config in (model.config, mesh)
    )
    for work in (Work(1, 0, 1, 100.0), Work(4000, 0, 4000, 1e6), Work(0, 900, 1, 0.0, 900, 4e5)):
        assert shared.of(work, 1000.0) == pytest.approx(one.of(work, 1000.0) / ranks, rel=1e-6)


def test_weights_are_made_where_they_are_used(toy, monkeypatch):
    """A device never holds more of them than its share and two layers': so is made what no device has room for."""
    held: list[dict[jax.Device, int]] = []

    def count(stacked):
        found = dict.fromkeys(jax.devices(), 0)
        for array in jax.live_arrays():
            for device in array.sharding.device_set:
                found[device] += array.nbytes * math.prod(array.sharding.shard_shape(array.shape)) // array.size
        held.append(found)
        return stacked

    config = spread(model_config(str(toy), 2), make_mesh(4))
    config = replace(config, num_layers=24)
    stack = shares.stack
    monkeypatch.setattr(shares, "stack", lambda parts, mesh: count(stack(parts, mesh)))
    count(None)
    params = random_params(config, "bfloat16")
    share, layer = (sum(leaf.nbytes for leaf in jax.tree.leaves(tree)) / 4 for tree in (params, params.layers[0]))
    assert len(held) == 1 + 24
    for device in jax.devices():
        most = max(found[device] for found in held) - held[0][device]
        assert share <= most <= share + 2 * layer if device.id < 4 else most == 0


def test_rules_by_layer_decide_random_shares(toy, tmp_path):
    file = tmp_path / "by_layer.json"
    file.write_text(json.dumps({"rules": [["layers.1.mlp.down_proj", "w8a16"], ["lm_head", "w8a16"]]}))
    config = spread(model_config(str(toy), 2), make_mesh(2))
    found = weight_formats(random_params(config, "bfloat16", str(file)))
    assert {name: fmt.name for name, fmt in found.items()} == {
        "model.layers.1.mlp.down_proj": "w8a16",
        "lm_head": "w8a16",
    }


def test_decode_steps_on_several_numbers_of_devices_in_one_run(toy, tmp_path, capsys):
    options = ["--config", str(toy), "--devices", "4", "1", "--batch", "1", "3", "--context", "40"]
    options += ["--steps", "2", "--repeats", "1", "--results", str(tmp_path), "--json"]
    rows = rows_of(partial(decode_step.main, options), capsys)["rows"]
    assert [(row["devices"], row["batch"]) for row in rows] == [(n, b) for n in (4, 1) for b in (1, 3)]
    for row in rows:
        (one,) = (each for each in rows if (each["devices"], each["batch"]) == (1, row["batch"]))
        assert row["floor_ms"] == pytest.approx(one["floor_ms"] / row["devices"], abs=6e-4)


def test_replicas_of_meshes_serve_the_workload(toy, tmp_path, capsys):
    """Each has it once: three requests for a plain engine, six for two, each engine on devices of its own."""
    (tmp_path / "work.json").write_text(json.dumps({"requests": [[5, 6], [3, 4], [9, 3]]}))
    options = ["--config", str(toy), "--workload", str(tmp_path / "work.json"), "--slots", "2", "--pages", "8"]
    options += ["--step-tokens", "8", "--warmup", "1", "--repeats", "1", "--results", str(tmp_path), "--json"]
    document = rows_of(partial(qps.main, [*options, "--devices", "2", "--replicas", "0", "2"]), capsys)
    assert document["experiment"] == "qps_toy_bfloat16_devices2_replicas0-2"
    rows = [row for row in document["rows"] if row["repeat"] == "mean"]
    assert [(row["devices"], row.get("replicas"), row["requests"]) for row in rows] == [(2, None, 3), (2, 2, 6)]
    assert rows[0]["floor_s"] == rows[1]["floor_s"], "from the weights on a mesh, and from shapes"


def test_more_devices_than_there_are(toy, tmp_path, capsys, monkeypatch):
    (tmp_path / "work.json").write_text(json.dumps({"requests": [[5, 6], [3, 4]]}))
    options = ["--config", str(toy), "--workload", str(tmp_path / "work.json")]
    monkeypatch.setattr("jllm.distributed.processes.visible_gpus", lambda: list("01234567"))
    assert qps.main([*options, "--devices", "2", "--replicas", "5"]) == 2
    assert "5 replicas need 10 devices, and there are 8: give 1 to 4" in capsys.readouterr().err
    assert qps.main([*options, "--devices", "16"]) == 2
    assert "16 devices asked for, and there are 8" in capsys.readouterr().err
    with pytest.raises(ConfigError, match="3 devices cannot share"):
        spread(load_config(toy), make_mesh(3))
