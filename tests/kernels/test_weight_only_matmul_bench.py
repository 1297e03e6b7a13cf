"""Checks the benchmark's bars, and a run in which everything is pretended to take 100 us."""

import json
from functools import partial

import jax

from pallas_kernels.formats.quantized_weights import decode, encode
from pallas_kernels.formats.weight_formats import parse_weight_format
from pallas_kernels.weight_only_matmul import bench, mosaic_sm90
from pallas_kernels.weight_only_matmul.cases import BENCH_FORMATS
from pallas_kernels.weight_only_matmul.config import candidates


def test_weights_are_as_the_format_stores_them():
    for name in BENCH_FORMATS:
        made = bench.random_weight(jax.random.key(0), name, 64, 256)
        expected = jax.eval_shape(lambda: encode(jax.numpy.zeros((64, 256)), parse_weight_format(name)))  # noqa: B023
        assert jax.tree.map(lambda x: (x.shape, x.dtype), made) == jax.tree.map(lambda x: (x.shape, x.dtype), expected)
        assert 0.5 < float(decode(made).std()) * 256**0.5 < 2, name


def test_bars_are_read_off_the_rows():
    """Holds each bar against the fastest row of its cell."""
    shape = {"K": 4096, "N": 12288}
    rows = [{"kernel": "copy", "gb_s": 4000}]
    for m, us in ((1, 28.0), (64, 33.0), (512, 70.0)):
        rows.append({**shape, "peer": "bf16", "scheme": "bf16", "M": m, "us": us, "gb_s": 1})
    for m, peer, us in ((1, "mosaic", 7.0), (64, "mosaic", 30.0), (512, "mosaic", 99.0), (512, "xla", 75.0)):
        rows.append({**shape, "peer": peer, "scheme": "w4a16-g128", "M": m, "us": us, "gb_s": 2000})
    rows.append({**shape, "peer": "mosaic", "scheme": "nf4", "M": 1, "error": "no"})
    assert [(bar["value"], bar["met"]) for bar in bench.bars(rows)] == [(4.0, True), (1.1, False), (0.933, True)]
    assert rows[4]["fraction"] == 0.5


def test_a_run_leaves_its_result(monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(bench, "BENCH_SHAPES", ((256, 64),))
    monkeypatch.setattr(bench, "ROTATED", 1)
    monkeypatch.setattr(bench, "DECODED", 2)
    monkeypatch.setattr(bench, "copy_bandwidth", lambda: 4e12)
    monkeypatch.setattr(bench, "device_us", lambda run, repeats: 99.0 if run() is None else 0.0)

    def traced(weights, m, k, backend, config):
        if backend == "xla":
            raise NotImplementedError("not this\nat all")
        return lambda: None

    monkeypatch.setattr(bench, "compiled", traced)
    arguments = [
        "--results",
        str(tmp_path),
        "--json",
        "--rows",
        "1",
        "2",
        "--formats",
        "nf4:2",
        "w8a16",
        "--tune",
        "w8a16",
    ]
    assert bench.main(arguments) == 0
    (path,) = tmp_path.iterdir()
    document = json.loads(path.read_text())
    assert document == json.loads(capsys.readouterr().out.splitlines()[-1])
    kinds = [row.get("peer") for row in document["rows"]]
    tuned = sum(len(candidates(m, 64, 256, parse_weight_format("w8a16"))) for m in (1, 2))
    assert kinds == [None, "bf16", "bf16", "mosaic", "xla", *["mosaic"] * tuned, "xla"]
    assert [row["error"] for row in document["rows"] if "error" in row] == ["not this"] * 2
    assert [(row["M"], row["us"]) for row in document["rows"][3:6:2]] == [(2, 33.0), (1, 33.0)]
    configs = [row["config"] for row in document["rows"] if "config" in row]
    assert configs == ["Config(fold=2, by_warp=True)", "RowConfig()", "StreamConfig()"]
    assert not document["complete"]


def test_every_variant_traces():
    for name, m, n in (
        ("w4a16-g128", 1, 128), ("w4a16-g128", 16, 8192), ("w8a16-g128", 16, 8192), ("fp8-weight", 16, 128),
        ("nf4", 128, 128), ("w4a16-g128", 200, 8192), ("w4a16-g128", 512, 128),
    ):  # fmt: skip
        w = jax.eval_shape(lambda: bench.random_weight(jax.random.key(0), name, n, 2048))  # noqa: B023
        for _, config in bench.variants(name, m, n, 2048, tune=True):
            x = jax.ShapeDtypeStruct((m, 2048), "bfloat16")
            if config is not None:
                product = partial(mosaic_sm90.weight_only_matmul, bias=None, residual=None, config=config)
                assert jax.eval_shape(lambda x, w: product(x, w, out_dtype=x.dtype), x, w).shape == (m, n)  # noqa: B023
