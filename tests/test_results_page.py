"""The pages of results: what the committed files say, all of it and nothing else."""

import json
import re

import pytest

from experiments import measure_all, results_page
from experiments.campaign import TOPICS
from experiments.claims import c23
from experiments.report import details, overview, pictures
from experiments.report.asked import ASKED
from experiments.report.commands import name_of, parses
from experiments.report.documents import RESULTS, is_flat, label_of, problems, read_all, read_result, superseded
from experiments.report.figures import Results
from experiments.report.markdown import slug
from experiments.report.standing import claim_rows
from experiments.report.strips import strips
from experiments.results_page import PAGE, texts
from experiments.steps.devices import ceilings_of
from jllm.errors import InputFileError

GOOD = {
    "experiment": "decode_attention", "date": "2026-11-20", "device": "NVIDIA H200", "versions": {"jax": "1"},
    "command": "python -m x", "complete": True, "bars": [], "rows": [],
}  # fmt: skip


def write(directory, name: str, **changes) -> None:
    (directory / f"{name}.json").write_text(json.dumps(GOOD | changes))


def page(directory, name: str = "steps") -> str:
    """One page of details."""
    return details.pages(read_all(directory))[name]


def short(directory) -> str:
    return overview.overview(Results(read_all(directory)))


def test_the_committed_pages_are_what_the_results_say():
    for path, text in texts().items():
        assert path.read_text(encoding="utf-8") == text, "run python -m experiments.results_page"
    assert PAGE.read_text(encoding="utf-8").count("\n") <= 150, "the page in short is read in five minutes"


def test_the_committed_pictures_are_what_the_results_say(tmp_path):
    """By their words and figures; where these stand may differ in a last digit from machine to machine."""
    pytest.importorskip("matplotlib")

    def words(path) -> list[str]:
        return re.findall(r">([^<>]+)</text>", path.read_text(encoding="utf-8"))

    for path in pictures.draw_all(Results(read_all()), tmp_path):
        assert words(path) == words(RESULTS / path.name) != [], "run python -m experiments.results_page"


def test_every_link_of_the_pages_leads_somewhere():
    headings = {
        path: {slug(title) for title in re.findall(r"^#+ (.*)$", text, re.MULTILINE)} for path, text in texts().items()
    }
    for path, text in texts().items():
        for target, anchor in re.findall(r"\]\(([^)#\s]*)(?:#([^)\s]*))?\)", text):
            file = (path.parent / target).resolve() if target else path
            assert file.exists(), f"{path.name}: {target}"
            assert not anchor or anchor in headings[file], f"{path.name}: #{anchor}"


def test_of_each_name_and_device_the_newest_file_alone_stays():
    assert not list(superseded()), "delete it; what it taught is a line in LOG.md"


@pytest.mark.parametrize("path", sorted(RESULTS.glob("*.json")), ids=lambda path: path.stem)
def test_every_result_keeps_to_one_schema(path):
    document = read_result(path)
    device = re.sub(r"\W+", "-", document["device"].lower().removeprefix("nvidia "))
    assert path.stem == f"{label_of(path)}-{document['date'].replace('-', '')}-{device}"
    assert f"{label_of(path)}-".startswith(f"{name_of(document)}-"), "a file's name begins with what its command says"


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"complete": "yes"}, "complete must be there, a bool"),
        ({"device": None}, "device must be there, a str"),
        ({"date": "20.11.2026"}, "date must be YYYY-MM-DD"),
        ({"rows": {}}, "rows must be a list of objects"),
        ({"rows": [{"a": {"b": 1}}]}, "rows 0: a must be a value"),
        ({"bars": [{"name": "x"}]}, "bar 0 must have bar, met, name, unit, value"),
    ],
)
def test_what_breaks_the_schema_is_named(tmp_path, changes, problem):
    write(tmp_path, "x", **changes)
    with pytest.raises(InputFileError, match=rf"x\.json: {re.escape(problem)}"):
        read_all(tmp_path)


def test_the_log_is_newest_first():
    log = (PAGE.parent / "LOG.md").read_text(encoding="utf-8")
    days = re.findall(r"^## .*\((\d{4}-\d\d-\d\d)", log, re.MULTILINE)
    assert len(days) == log.count("\n## "), "every section has its day"
    assert days == sorted(days, reverse=True)


def test_the_log_begins_with_links_to_its_sections_and_with_the_files_that_are_gone():
    log = (PAGE.parent / "LOG.md").read_text(encoding="utf-8")
    before, _, sections = log.partition("\n## ")
    headings = {slug(title) for title in re.findall(r"^(?:## )?(.*)$", sections, re.MULTILINE)}
    links = re.findall(r"\]\(#([^)]*)\)", before)
    assert len(links) > 50
    assert not set(links) - headings
    gone = set(re.findall(r"[\w.-]+-\d{8}[\w-]*", before))
    named = set(re.findall(r"results/([\w.-]*?-\d{8}[\w-]*)", sections))
    assert {name for name in named if not any(RESULTS.glob(f"{name}*"))} == gone


def test_values_are_plain_or_lists_of_plain():
    assert all(map(is_flat, (1, 1.5, "x", None, True, [1, "x"])))
    assert not any(map(is_flat, ({}, [[1]], [{}])))
    assert list(problems([])) == ["not an object"]


def test_the_newest_of_each_device_is_shown(tmp_path):
    rows = [{"peer": "mosaic", "R": 1, "length": 8, "H": 2, "K": 2, "kv": "bf16", "us": 7.25}]
    write(tmp_path, "decode_attention-20261120-h200", rows=[{**rows[0], "us": 9.75}])
    write(tmp_path, "decode_attention-20261122-h200", rows=rows, date="2026-11-22", complete=False)
    write(tmp_path, "decode_attention-20261119-cpu", rows=[{**rows[0], "us": 1234.0}], device="cpu", date="2026-11-19")
    assert [path.name for path in superseded(tmp_path)] == ["decode_attention-20261120-h200.json"]
    text = page(tmp_path, "kernels")
    assert "7.25" in text
    assert "1234" in text
    assert "9.75" not in text
    assert "2026-11-22, incomplete |" in text
    assert "## Decode attention against FlashInfer and cuDNN (H200)\n" in text
    assert "## Decode attention against FlashInfer and cuDNN (CPU)\n" in text


def test_a_person_finds_flashinfer_by_the_first_table(tmp_path):
    bars = [
        {"name": f"(R, length)=({cell}) H/K=32/32 {kv}", "value": v, "unit": "us", "bar": 10.0, "met": v <= 10}
        for cell, kv, v in (
            ("1, 1024", "bf16", 9.0), ("16, 1024", "bf16", 12.0), ("16, 1024", "int8-g8", 30.0),
            ("64, by Zipf's law", "bf16", 8.0), ("64, 63 x 512, 1 x 33280", "bf16", 8.0),
        )
    ]  # fmt: skip
    rows = [
        {"peer": who, "R": 1, "length": 1024, "H": 32, "K": 32, "kv": "bf16", "us": us}
        for who, us in (("mosaic", 9.0), ("cudnn, contiguous", 8.0))
    ]
    rows += [{"peer": "xla", "R": 1, "error": "out of memory"}] * 2
    write(tmp_path, "decode_attention-20261120-h200", rows=rows, bars=bars)
    (tmp_path / "decode_attention-20261120-h200.svg").write_text("<svg/>")
    text = page(tmp_path, "kernels")
    title = "Decode attention against FlashInfer and cuDNN"
    short = "1 of 2 cells at FlashInfer's time or under it: 0.90 to 1.20 times it"
    assert f"| [{title}](#{slug(title)}) | {short} | 3 of 5 | H200 | 2026-11-20 |" in text
    assert "the time of FlashInfer's fastest variant, where it ran in the same job" in text
    assert "| R | length | H | K | kv | mosaic | cudnn, contiguous |" in text
    assert "| 1 | 1024 | 32 | 32 | bf16 | 9 | 8 |" in text
    assert "2 not measured: out of memory" in text
    assert f"![{title}](decode_attention-20261120-h200.svg)" in text
    assert "5 bars, 2 missed" in text
    assert text.count("✗") == 2


def test_what_a_command_calls_its_experiment():
    def said(command: str, experiment: str = "own") -> str:
        return name_of({"command": command, "experiment": experiment})

    assert said("python -m pallas_kernels.matmul.bench --rows 1 --label many") == "matmul-many"
    assert said("python -m pallas_kernels.matmul.bench --rows 1") == "matmul"
    assert (
        said("python -m experiments.start_up --label=x")
        == said("python -m experiments.start_up --label x")
        == "start_up-x"
    )
    assert said("python -m experiments.gone --label x") == "gone-x"
    run = "python -m experiments.throughput --scheme bf16 --kv-cache"
    assert said(f"{run} int8-g8 --rows 80x1024x1024") == "throughput_llama-2-7b_bf16_kv-int8-g8"
    assert said(f"{run} k=int8-g8,v=bf16 --label a") == "throughput_llama-2-7b_bf16_kv-k-int8-g8-v-bf16-a"
    assert said("python -m experiments.qps --peers ../gone --peer-seconds 45") == "qps_llama-2-7b_bfloat16"
    assert said("python -m experiments.step_profile --kind serve --scheme w8a8 --batch 1") == "step_profile_serve-w8a8"
    for command in (
        "a sweep",
        "python -m experiments.claims C1 C3",
        "python -m experiments.qps --gone 1",
        "python x.py",
    ):
        assert said(command) == "own"


def test_a_file_is_shown_by_what_its_command_says_and_by_its_own_name_beside_another(tmp_path):
    command = "python -m pallas_kernels.matmul.bench"
    write(tmp_path, "matmul-other-20261120-h200", experiment="matmul-other", command=command)
    write(tmp_path, "matmul-many-20261120-h200", experiment="matmul-many", command=f"{command} --label many")
    text = page(tmp_path, "kernels")
    assert "## 16-bit products of few rows against XLA: matmul\n" in text
    assert "## 16-bit products of few rows against XLA: matmul-many\n" in text
    write(tmp_path, "matmul-20261121-h200", experiment="matmul", command=command, date="2026-11-21")
    text = page(tmp_path, "kernels")
    assert "## 16-bit products of few rows against XLA: matmul\n" in text
    assert "## 16-bit products of few rows against XLA: matmul-other\n" in text


def test_a_figure_in_short_is_our_own_and_of_what_it_says(tmp_path):
    served = [{"repeat": 0, "qps": 35.2}, {"repeat": "mean", "qps": 35.1}, {"peer": "transformers", "qps": 2.7}]
    write(tmp_path, "qps_x-20261120-h200", experiment="qps_x", rows=served)
    starts = [{"start": kind, "start_s": s} for kind, s in (("cold", 58.9), ("warm", 1.83), ("warm", 1.8))]
    write(tmp_path, "start_up-20261120-h200", experiment="start_up", rows=starts)
    text = page(tmp_path)
    assert "| 35.1 requests a second |" in text
    assert "| 58.9 s cold, 1.8 s warm |" in text


def test_a_run_that_was_cut_off_is_shown_with_bars(tmp_path):
    row = {"model": "m", "batch": 64, "kv": "bfloat16", "backend": "default", "floor_fraction": 0.74}
    command = "python -m experiments.decode_step"
    write(tmp_path, "x", experiment="decode_step", command=command, rows=[row], complete=False)
    text = page(tmp_path)
    assert "| 74% to 74% of the floor | 0 of 1 | H200 | 2026-11-20, incomplete |" in text
    assert "not all that it asks for was measured; bars are of what was" in text
    assert "| m batch 64 bfloat16, share of the floor | 0.74 | 0.86 | ✗ |" in text


@pytest.mark.parametrize("experiment", ["claims-C23", "claims-C23-burst"])
def test_a_verdict_is_by_the_rule_of_today(tmp_path, experiment):
    """The 99 % in time of this burst were no steady state, whatever the file said of them when it was written."""
    rows = [
        {"load": None, "rate": None, "qps": 40.0},
        {
            "load": 0.9,
            "rate": 32.0,
            "qps": 20.0,
            "requests": 384.0,
            "good_share": 1.0,
            "ttft_ms_p99": 1,
            "itl_ms_p99": 1,
        },
        {"stated": "in time", "measured": "up to 32 requests a second", "verdict": "yes"},
    ]
    write(tmp_path, "x", experiment=experiment, rows=rows)
    text = page(tmp_path, "claims")
    assert "## Claim C23: service quality" in text
    assert "up to 32 requests a second" not in text
    assert "Yes: 99% of requests are in time in a burst of 12 s of up to 32 arrivals a second, no steady state" in text
    assert "the verdict is that of its rows by the rule of today" in text
    again = rows[:-1] + [rows[-1] | {"measured": c23.judge(rows[:-1]).measured}]
    write(tmp_path, "x", experiment=experiment, rows=again)
    assert "the rule of today" not in page(tmp_path, "claims")


def test_claims_about_any_model_are_answered_by_the_bundled_one(tmp_path):
    verdict = {"stated": "more", "measured": "Yes: more", "verdict": "yes"}
    for name, day, more in (
        ("claims-C6", 24, {"subject": "the bundled model"}),
        ("claims-C6-mine", 25, {"subject": "the model mine"}),
    ):
        rows = [{"kv": "int8-g8", "times": 1.6, "added": 0.0, "kl": 0.0, **more}, verdict]
        write(tmp_path, name, experiment=name, date=f"2026-11-{day}", rows=rows)
    assert [(claim, entry.path.stem) for claim, entry in claim_rows(Results(read_all(tmp_path)))] == [
        ("C6", "claims-C6")
    ]


def test_every_partly_says_what_is_yes_and_what_is_no():
    """On RESULTS.md and on the page of claims, of every claim that is answered."""
    summary = [line for line in PAGE.read_text().splitlines() if re.match(r"\| \[C\d+\]", line)]
    verdicts = re.findall(
        r"^\| [^|]+ \| ([^|]+) \| (?:yes|partly|no|open) \|$", (RESULTS / "claims.md").read_text(), re.M
    )
    partly = [line for line in summary if line.endswith("**partly** |")]
    assert len(partly) > 20
    for line in summary:
        answer = line.split(" | ")[2]
        kinds = set(re.findall(r"(?:^|[.…] )(Yes|No|Open): ", answer))
        assert {"Yes", "No"} <= kinds if line in partly else len(kinds) == 1, line
    for said in verdicts:
        assert re.search(r"(?:^|\. )(?:Yes|No|Open): ", said), said


def test_every_claims_page_has_its_method_and_rule():
    chapters = (RESULTS / "claims.md").read_text().split("\n## ")[1:]
    assert len(chapters) > 25
    for chapter in chapters:
        method, _, rest = chapter.partition("\n\nRule: ")
        assert len(method.splitlines()) > 2, chapter[:20]
        assert rest.partition("\n")[0].endswith("."), chapter[:20]


def test_a_claim_that_was_cut_off_says_what_it_has_so_far(tmp_path):
    served = {"claim": "C1", "requests": 8, "ttft_ms_p50": 9.0}
    rows = [served | {"policy": policy, "qps": qps} for policy, qps in (("dynamic", 12.0), ("static", 10.0))]
    write(tmp_path, "x", experiment="claims-C1", rows=rows, complete=False, size="full")
    assert "so far: Yes: more requests a second, +20.0 %" in page(tmp_path, "claims")
    assert "**incomplete**" in short(tmp_path)
    write(tmp_path, "x", experiment="claims-C1", rows=rows, complete=False, size="toy")
    assert "so far" not in page(tmp_path, "claims")


def test_what_a_file_does_not_hold_of_its_run_is_said(tmp_path):
    clocks = {"sm": 1755, "most_sm": 1980, "memory": 3201}
    write(tmp_path, "x-20261120-h200", commit="abc", driver="570", clocks_mhz=clocks)
    text = page(tmp_path, "kernels")
    assert ", commit abc, driver 570, clocks 1755 of 1980 MHz, memory 3201" in text
    assert "recorded" not in text
    write(tmp_path, "x-20261120-h200", commit="abc")
    assert ", commit abc, no driver or clocks recorded" in page(tmp_path, "kernels")


def test_an_experiment_without_a_description_is_shown_whole(tmp_path):
    write(tmp_path, "new-20261120-h200", experiment="new", rows=[{"a": 1, "b": [2, 2]}, {"c": "x|y"}])
    text = page(tmp_path)
    assert "## new, H200" in text
    assert "| 1 | 2 x 2 |" in text
    assert "| x\\|y |" in text


def test_the_command_checks_and_writes(tmp_path, monkeypatch, capsys):
    write(tmp_path, "new-20261120-h200", experiment="new")
    monkeypatch.setattr(results_page, "PAGE", tmp_path / "RESULTS.md")
    monkeypatch.setattr(results_page, "RESULTS", tmp_path)
    assert results_page.main(["--check"]) == 1
    assert "stale: RESULTS.md, " in capsys.readouterr().out
    assert results_page.main([]) == 0
    assert results_page.main(["--check"]) == 0


# The page in short


def test_steps_stand_beside_their_floor_and_peers_of_as_many_bits(tmp_path):
    row = {"batch": 32, "input": 8, "decode_ms": 4.0, "decode_floor_ms": 3.2, "h800_decode_ms": 7.0}
    row |= {"model": "m", "scheme": "s", "kv": "k", "floor_fraction": 0.8, "prefill_floor_fraction": 0.7}
    for name in ("bf16_kv-bf16", "bf16_kv-int8-g8", "w8a8_kv-int8-g8"):
        rows = [row, row | {"input": 1024, "decode_ms": 9.0, "floor_fraction": 0.9}]
        if name == "bf16_kv-bf16":  # two variants, of which the faster counts
            peer = {"peer": "torch.compile and CUDA graphs", "batch": 32}
            rows += [peer | {"decode_ms": ms} for ms in (5.5, 5.0, 6.0)]
        write(tmp_path, f"throughput_llama-2-7b_{name}-20261120-h200", experiment=name, rows=rows)
    text = short(tmp_path)
    assert "**jllm bf16**: 1.25 to 1.25 times its floor; PyTorch takes 1.25 to 1.25 times as long; vLLM*" in text
    assert text.count(" | 80% to 80% | 90% to 90% | 70% to 70% |") == 3
    scaled = 7.0 * 3350 / 4800
    assert f"| 32 | 3.20 | 4.00 | 5.00 | 5.76 | 3.20 | 4.00 | {scaled:.2f} | 3.20 | 4.00 | 5.09 |" in text
    assert "vLLM*: [peers_h200](workloads/peers_h200.json)" in text
    vllm = {"peer": "vLLM", "weights": "bf16", "batch": 32, "input": 8}
    write(tmp_path, "qps_llama-2-7b_x-20261120-h200", experiment="x", rows=[vllm | {"decode_ms": 7.0}])
    assert "| 32 | 3.20 | 4.00 | 5.00 | 7.00 |" in (text := short(tmp_path))
    assert "vLLM*: [qps_llama-2-7b_x-20261120-h200](" in text  # of a job that timed no steps of ours
    write(tmp_path, "throughput_llama-2-7b_y-20261119-h200", experiment="y", rows=[vllm | {"decode_ms": 6.5}])
    assert "| 32 | 3.20 | 4.00 | 5.00 | 6.50 |" in (text := short(tmp_path))
    assert "; vLLM: [throughput_llama-2-7b_y-20261119-h200](" in text


def test_requests_a_second_have_their_interval_and_peers_say_that_they_ran_elsewhere(tmp_path):
    row = {"scheme": "bfloat16", "kv": "bfloat16", "rate": None}
    rows = [row | {"repeat": i, "qps": qps} for i, qps in enumerate((30.0, 32.0))]
    mean = row | {"repeat": "mean", "qps": 31.0, "qps_ci": 2.5, "floor_fraction": 0.8}
    cut = {"peer": "transformers' continuous batching", "qps": 99.0, "cut_off": True}
    write(tmp_path, "qps_llama-2-7b_bfloat16-20261120-h200", rows=[*rows, mean, cut])
    text = short(tmp_path)
    assert "| jllm bf16, KV bf16 | 31.0 | ± 2.5 | 80% | [2 runs](results/qps_llama-2-7b_bfloat16" in text
    assert re.search(r"\| vLLM\* bf16, KV bf16 \| 30\.1 \|  \|  \| \[another run\]", text)
    assert "99.0" not in text
    served = [{"peer": "vLLM", "weights": "bf16", "kv": "bf16", "requests": 1024, "qps": qps} for qps in (28.0, 29.0)]
    write(tmp_path, "qps_llama-2-7b_bfloat16-20261121-h200", rows=[*rows, *served], date="2026-11-21")
    text = short(tmp_path)
    assert "| vLLM bf16, KV bf16 | 28.5 | ± 6.4 |  | [2 runs](results/qps_llama-2-7b_bfloat16-20261121-h200" in text
    assert "vLLM* bf16" not in text
    assert "vLLM* fp8" in text


def test_a_peer_of_the_same_file_stands_in_place_of_pasted_figures(tmp_path):
    ours = {"kernel": "decode_attention", "peer": "mosaic", "R": 16, "length": 1024, "H": 32, "K": 8, "kv": "bf16"}
    rows = [ours | {"us": 20.0}, ours | {"us": 25.0, "Q": 4}]
    write(tmp_path, "decode_attention-20261120-h200", rows=rows)
    (strip,) = strips(Results(read_all(tmp_path)))
    assert (strip.kernel, strip.cells, strip.elsewhere) == ("decode attention, 32/8", {"16 x 1024": [22.6 / 20]}, True)
    theirs = [ours | {"peer": "FlashInfer", "variant": v, "us": us, "Q": 1} for v, us in (("tc", 24.0), ("cuda", 30.0))]
    write(tmp_path, "decode_attention-20261120-h200", rows=[*rows, *theirs])
    (strip,) = strips(Results(read_all(tmp_path)))
    assert (strip.cells, strip.elsewhere) == ({"16 x 1024": [1.2]}, False)
    assert "FlashInfer, tc | FlashInfer, cuda |" in page(tmp_path, "kernels")


def test_strips_pair_rows_of_one_case_and_keep_the_range_over_shapes(tmp_path):
    def row(peer: str, k: int, us: float) -> dict:
        return {"kernel": "matmul", "peer": peer, "M": 128, "K": k, "N": 8, "us": us, "gb_s": int(us)}

    rows = [row("mosaic", 1, 10.0), row("xla", 1, 12.0), row("mosaic", 2, 10.0), row("xla", 2, 9.0)]
    write(tmp_path, "matmul-many-20261120-h200", experiment="matmul", rows=[*rows, row("xla", 3, 5.0)])
    (strip,) = strips(Results(read_all(tmp_path)))
    assert (strip.kernel, strip.peer, strip.cells) == ("bf16 product, by rows", "XLA", {"128": [1.2, 0.9]})
    red, white, green = (pictures.cell_color(times) for times in (0.5, 1.0, 2.0))
    assert (red[0] > red[1], white, green[1] > green[0]) == (True, (1, 1, 1), True)


def test_bars_show_the_farthest_behind_of_the_newest_files(tmp_path):
    def bars(first: float, second: float) -> list[dict]:
        asked = {"unit": "us", "bar": 60.0}, {"unit": "us", "bar": 450.0}
        found = zip((1, 512), (first, second), asked)
        return [
            {"name": f"R={r} V=128256 top-k, top-p", "value": us, **each, "met": us <= each["bar"]}
            for r, us, each in found
        ]

    write(tmp_path, "sample-old-20261120-h200", experiment="sample-old", bars=bars(900.0, 900.0))
    write(tmp_path, "sample-20261122-h200", date="2026-11-22", experiment="sample", bars=bars(40.0, 500.0))
    text = short(tmp_path)
    assert re.search(r"\| drawing one of 128,256 tokens \| .* \| 1 of 2 \| 500 us for 450 \| \[sample\]\(", text)
    assert re.search(r"Bars missed by further results, .*: \[sample-old\]\([^)]*\) 2 of 2\.", text)
    write(tmp_path, "sample-20261122-h200", date="2026-11-22", experiment="sample", bars=bars(40.0, 400.0))
    assert "| 2 of 2 | 400 us for 450 |" in short(tmp_path)


def test_stale_files_say_why(tmp_path):
    bench = "python -m pallas_kernels.sample.bench"
    write(tmp_path, "norm_quant-20261122-h200", experiment="norm_quant", command="a sweep")
    write(tmp_path, "qps_x-20261120-h200", experiment="qps_x", command="python -m experiments.qps --gone 1")
    write(tmp_path, "gone-20261122-h200", experiment="gone", command="python -m experiments.gone")
    write(tmp_path, "sample-20261122-h200", experiment="sample", command=bench)
    write(tmp_path, "sample-a-20261122-h200", experiment="sample-a", command=f"{bench} --label a", commit="12ab+")
    write(tmp_path, "sample-b-20261122-h200", experiment="sample-b", command=f"{bench} --label b", commit="12ab")
    write(
        tmp_path, "claims-C5-20261122-h200", experiment="claims-C5", command="python -m experiments.claims C5 C6",
        commit="12ab", complete=False,
    )  # fmt: skip
    text = short(tmp_path)
    for reason, label in (
        ("no command: a sweep while the kernel was built", "norm_quant"),
        ("its command is refused today", "qps_x"),
        ("experiments.gone is gone", "gone"),
        ("measured before commits were recorded", "sample"),
        ("measured with changes that its commit does not have", "sample-a"),
        ("cut off before its end", "claims-C5"),
    ):
        assert re.search(rf"^- {reason}: \[{label}\]\(results/\w+.md#[^)]*\)$", text, re.M), reason
    again = "`measure_all --only C5 sample norm_quant` measures them again, but for gone, qps_x, sample-a:"
    assert set(re.findall(r"[\w-]+", again)) == set(
        re.findall(r"[\w-]+", re.search(r"`measure_all --only .*:$", text, re.M)[0])
    )
    assert "sample-b" not in text[text.index("## What is stale") :]


def test_what_takes_two_gpus_is_measured_again_by_a_command_of_its_own(tmp_path):
    two = "python -m experiments.decode_step --label two --devices 2 1"
    write(tmp_path, "decode_step-two-20261124-h100", experiment="decode_step-two", command=two)
    write(tmp_path, "sample-20261122-h200", experiment="sample", command="python -m pallas_kernels.sample.bench")
    again = re.search(r"On a GPU (`.*) measure them again:$", short(tmp_path), re.M)
    assert again is not None
    assert again[1] == "`measure_all --only sample` and `measure_all --only two --gpus 2`"
    for command in again[1].split(" and "):
        assert measure_all.main([*command.strip("`").split()[1:], "--seconds", "0", "--results", str(tmp_path)]) == 1


def test_bars_without_a_figure_are_named_with_the_line_that_measures_them(tmp_path):
    lines = {line for asked in ASKED for line in asked.lines.split()}
    assert lines <= {command.name for commands in TOPICS.values() for command in commands}
    row = {"model": "llama-2-7b", "batch": 1, "kv": "bfloat16", "backend": "default", "devices": 2, "decode_ms": 9.0}
    command = "python -m experiments.decode_step --label two"
    step = {"experiment": "decode_step-two", "command": command, "complete": False, "rows": [row]}
    write(tmp_path, "decode_step-two-20261124-h100", device="NVIDIA H100", **step)
    assert "; LLaMA-2-7B on two H200s, bf16 (2.6 ms at batch 1, 3.7 at 64: `two`); LLaMA-2-70B" in short(tmp_path)
    write(tmp_path, "decode_step-two-20261124-h200", **step)
    assert "| LLaMA-2-7B on two H200s, bf16 | 2.6 ms at batch 1, 3.7 at 64 | 0 of 1 | 9 ms for 2.6 |" in short(tmp_path)


def test_every_bar_that_is_asked_for_has_a_rule():
    """The committed files have bars of its names, or another test judges rows that would."""
    entries = read_all()
    without = {asked.what for asked in ASKED if not asked.found(entries)}
    assert without <= {
        "decode attention, bf16", "prefill attention", "8-bit products", "QPS workload in `w8a8`, over vLLM's in fp8",
        "QPS workload, Triton's kernels over Mosaic's", "LLaMA-2-7B on two H200s, bf16",
        "LLaMA-2-70B on two GPUs, bf16",
    }  # fmt: skip


def test_what_rotating_adds_is_judged_by_two_files_of_one_run(tmp_path):
    def step(kv: str, ms: float, commit: str = "ab") -> None:
        row = {"model": "m", "batch": 64, "kv": kv, "backend": "mosaic", "decode_ms": ms}
        command = f"python -m experiments.decode_step --kv-cache {kv} --label {kv}"
        write(tmp_path, f"decode_step-{kv}-20261120-h200", experiment=f"decode_step-{kv}", command=command,
              rows=[row], commit=commit)  # fmt: skip

    step("int4-g32", 5.0), step("int4-g32-h", 5.2)
    assert "| 0 of 1 | 1.04 times for 1.03 | [decode_step-int4-g32-h]" in short(tmp_path)
    step("int4-g32-h", 5.1)
    assert "| 1 of 1 | 1.02 times for 1.03 |" in short(tmp_path)
    step("int4-g32-h", 5.1, commit="cd")
    assert "rotating K and V in `int4-g32-h` (1.03 of a decode step without: `unrotated`, `rotated`)" in short(tmp_path)


def test_other_gpus_have_bars_of_their_own_ceilings_and_none_of_an_h200s(tmp_path):
    """A share of the floor is by the device that ran; milliseconds are an H200's."""
    row = {"model": "llama-2-7b", "batch": 1, "kv": "bfloat16", "backend": "default", "decode_ms": 4.0}
    row |= {"floor_ms": 2.0, "floor_fraction": 0.5}
    step = {"experiment": "decode_step", "command": "python -m experiments.decode_step", "rows": [row]}
    four = {"scheme": "w4a16-g128", "batch": 1, "kv": "bf16", "decode_ms": 1.7}
    scheme = {"experiment": "quant_steps", "command": "python -m experiments.quant_steps", "rows": [four]}
    for name, device in (("h200", "NVIDIA H200"), ("h100", "NVIDIA H100 80GB HBM3")):
        write(tmp_path, f"decode_step-20261120-{name}", device=device, complete=False, **step)
        write(tmp_path, f"quant_steps-20261120-{name}", device=device, complete=False, **scheme)
    entries = read_all(tmp_path)
    found = {(entry.device, bar["unit"]): bar["value"] for entry in entries for bar in entry.document["bars"]}
    h200, h100 = found["NVIDIA H200", "1"], found["NVIDIA H100 80GB HBM3", "1"]
    assert h100 / h200 == pytest.approx(4.55e12 / ceilings_of("NVIDIA H100 80GB HBM3").bandwidth, rel=0.01)
    assert found["NVIDIA H200", "ms"] == 1.7
    assert ("NVIDIA H100 80GB HBM3", "ms") not in found
    text = page(tmp_path)
    assert "those of today, not the file's own: 4.55 TB/s, 813 TFLOP/s (1,673 in 8 bits) and 652 TFLOP/s" in text
    assert f"not the file's own: {ceilings_of('NVIDIA H100 80GB HBM3').rates}" in text


def test_options_of_peers_count_for_no_refusal():
    assert parses("python -m experiments.throughput --scheme bf16 --peers ../gone --peer-seconds 110")
    assert not parses("python -m experiments.throughput --gone")
    assert parses("python -m experiments.claims C1 C3")
    assert parses("python -m experiments.train_needle")  # which wants an --out


def test_long_figures_of_a_claim_end_at_a_part():
    assert overview.shortened("short; whole") == "short; whole."
    assert overview.shortened("first; " + "x, " * 100) == "first; " + ", ".join("x" * 47) + " …"
