"""Bars: which side of one is met, of the committed files as of the rules that made them."""

import re

import pytest

from experiments.report.commands import module_of
from experiments.report.documents import RESULTS, read_result
from experiments.report.judged import bars_of, judged
from pallas_kernels.bench.bars import H200, asked_of, bar

# "unit name" of the bars that ask for little, and of those that ask for much.
AT_MOST = (
    r"(us|s|MiB|MB|kB|kl|of kl) |x (KL|error)|1 perplexity added|.* errors of memcheck$|.* ladder slack$|1 gap between|"
    r".* upper end of the ratio's interval$|nats largest difference|"
    r"of all needles found that were forgotten|1 INT4 over bf16, .*: at most$|"
    r"1 verifying \d+ rows over a plain step|times .*, triton over the default$|ms (decode, .*|.* on 2 devices)$"
)
AT_LEAST = (
    r"tflop_s .* rate$|fraction |times .* speed over bf16's$|x over FlashAttention|.* share of the floor$|"
    r".* bandwidth$|.* times as fast as bf16$|1 rank correlation|.* of cuDNN's rate$|1 learned over|"
    r"1 INT4 over bf16, .*: at least(, .*)?$|1 share of held-out outputs within|"
    r".* (requests a second|times as many as vLLM)$|"
    r"1 .* replicas over one$|1 QPS workload, .*, triton over the default$|"
    r"of all (needles found (with|that were kept)|answers found at)|"
    r"1 .*: times (as fast as plain|the tokens a second)$|1 triton, .*: of mosaic's rate$"
)
FILES = {path.name: read_result(path) for path in sorted(RESULTS.glob("*.json"))}


def is_met(entry: dict) -> bool:
    """By the bar's name and unit alone, whatever made it."""
    said = f"{entry['unit']} {entry['name']}"
    most, least = bool(re.match(AT_MOST, said)), bool(re.match(AT_LEAST, said))
    assert most != least, f"say in this test whether little or much of it is good: {said}"
    value, limits = entry["value"], [float(x) for x in re.findall(r"[\d.]+", str(entry["bar"]))]
    if len(limits) == 2:
        return limits[0] <= value <= limits[1]
    return value <= limits[0] if most else value >= limits[0]


def test_a_bar_is_met_on_its_side_and_where_it_is():
    assert [bar("time", us, "us", 10.0, most=True)["met"] for us in (9.9, 10.0, 10.1)] == [True, True, False]
    assert [bar("share", x, "1", 0.75)["met"] for x in (0.74, 0.75, 0.76)] == [False, True, True]
    assert bar("time", 9.5, "us", 10.0) == {"name": "time", "value": 9.5, "unit": "us", "bar": 10.0, "met": False}


def test_a_bar_of_one_device_is_asked_of_no_other():
    bars = [bar("time", 9.0, "ms", 10.0, most=True, of=H200), bar("share", 0.8, "1", 0.75)]
    assert [each["name"] for each in asked_of("NVIDIA H100 80GB HBM3", bars)] == ["share"]
    assert asked_of(H200, bars)[0] == bar("time", 9.0, "ms", 10.0, most=True)


def test_every_committed_bar_is_met_or_missed_as_it_says():
    wrong = [(name, entry) for name, file in FILES.items() for entry in file["bars"] if entry["met"] != is_met(entry)]
    assert not wrong


def test_the_rules_make_the_committed_bars_of_the_committed_rows():
    """Value, bar and met of each; so a rule that lets a slower one pass fails here, whichever module it is in. Files
    keep the floors and bars of their day, so that both are those that `judged` makes of the rows."""
    checked = set()
    for name, file in FILES.items():
        read = judged(file)
        found = {entry["name"]: entry for entry in asked_of(read["device"], bars_of(read))}
        for entry in read["bars"]:
            if "rank correlation" in entry["name"] or not found:
                continue  # with another file; or by no rule for rows alone
            assert found.get(entry["name"]) == entry, name
            claim = re.match("claims-C[0-9]+", name)
            checked.add(claim[0] if claim else module_of(file["command"]))
        assert all(entry["met"] == is_met(entry) for entry in found.values()), name
    kernels = (
        "all_reduce cache_update decode_attention fp8_matmul int8_matmul matmul move_tokens norm_quant "
        "prefill_attention sample silu_mul_quant swiglu weight_only_matmul"
    )
    modules = (
        "continuations decode_step first_command load_memory long_context mixed_precision outliers ptq_methods qps "
        "quant_accuracy quant_steps rotations sanitizer simulate"
    )
    assert checked == {
        *(f"pallas_kernels.{name}.bench" for name in kernels.split()),
        *(f"experiments.{name}" for name in [*modules.split(), "start_up", "step_profile", "throughput"]),
        *(f"claims-C{n}" for n in (5, 6, 7, 8, 17)),
    }


@pytest.mark.parametrize(
    ("module", "letter"), [("norm_quant", "E"), ("silu_mul_quant", "F")], ids=["norm_quant", "silu_mul_quant"]
)
def test_bars_of_kernels_on_single_rows(module, letter):
    """Of which no file of today's benchmark is kept: one row in microseconds, many by bandwidth, all against XLA."""
    row = {letter: 11008 if letter == "F" else 4096, "kind": "int8", "residual": None, "fraction": 0.8}
    times = {"mosaic": (2.4, 3.5), "xla": (2.5, 3.4)}
    rows = [row | {"peer": peer, "T": t, "us": us} for peer, pair in times.items() for t, us in zip((1, 8192), pair)]
    found = bars_of({"experiment": module, "command": f"python -m pallas_kernels.{module}.bench", "rows": rows})
    assert [(entry["value"], entry["met"]) for entry in found] == [
        (2.4, True), (2.4, True), (0.8, True), (3.5, False)
    ]  # fmt: skip
    slow = [each | ({"us": 9.0, "fraction": 0.79} if each["peer"] == "mosaic" else {}) for each in rows]
    found = bars_of({"experiment": module, "command": f"python -m pallas_kernels.{module}.bench", "rows": slow})
    assert not any(entry["met"] for entry in found)


def test_an_exchange_of_two_has_a_bar_up_to_64_rows_of_4096():
    """By values, whatever the rows are long; more ranks, other exchanges and what failed have none."""
    row = {"backend": "peer", "ranks": 2, "M": 64, "E": 4096, "dtype": "bfloat16", "us": 9.0, "us_longer_chain": 5.0}
    rows = [
        row, row | {"M": 32, "E": 8192, "us_longer_chain": 6.1}, row | {"E": 8192}, row | {"ranks": 4},
        row | {"backend": "xla"}, row | {"backend": "two-shot"},
        {"backend": "peer", "ranks": 2, "M": 1, "E": 4096, "dtype": "bfloat16", "error": "no room"},
        {"backend": "peer", "error": "no nvcc"},
    ]  # fmt: skip
    found = bars_of({"experiment": "all_reduce", "command": "python -m pallas_kernels.all_reduce.bench", "rows": rows})
    assert [(entry["name"], entry["value"], entry["met"]) for entry in found] == [
        ("2 ranks, 64 x 4096 bfloat16", 5.0, True), ("2 ranks, 32 x 8192 bfloat16", 6.1, False)
    ]  # fmt: skip


def test_a_run_that_was_cut_off_has_bars():
    """Of its rows, though it never came to write any: all of the whole run's but those of its last row."""
    whole = judged(FILES["throughput_llama-2-7b_bf16_kv-int8-g8-20261126-h200.json"])
    bars = judged(whole | {"complete": False, "bars": [], "rows": whole["rows"][:-1]})["bars"]
    assert bars == whole["bars"][:-2]  # of decoding and of prefill
    decode = [row["floor_fraction"] for row in whole["rows"][:-1]]
    assert [entry["value"] for entry in bars if entry["name"].startswith("decode")] == decode


def test_a_run_may_be_cut_off_at_any_row():
    """What Ctrl-C leaves of any experiment can be shown, before its first row too."""
    for name, file in FILES.items():
        for count in range(min(4, len(file["rows"]))):
            cut = judged(file | {"complete": False, "bars": [], "rows": file["rows"][:count]})
            assert all(entry["met"] == is_met(entry) for entry in cut["bars"]), name
            assert count or not cut["bars"], name


def test_what_has_no_rule_has_no_bars():
    document = {"experiment": "x", "device": "cpu", "complete": False, "bars": [], "rows": [{"M": 1}]}
    for command in (
        "a sweep, before the benchmark",
        "python -m os.path",
        "python -m experiments.gone",
        "python -m experiments.kv_choices",
    ):
        assert judged(document | {"command": command})["bars"] == []
    rows = {"device": "NVIDIA H200", "rows": FILES["decode_step-20261127-h200.json"]["rows"]}
    assert len(judged(document | rows | {"command": "python -m experiments.decode_step"})["bars"]) == 5
    assert not judged(document | rows | {"command": "python -m experiments.decode_step --layers 2"})["bars"]
