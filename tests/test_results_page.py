"""The pages of results: what the committed files say, all of it and nothing else."""

import json
import re

import pytest

from experiments import results_page
from experiments.claims import c7, c8, c23, c30
from experiments.report import details, documents, overview, pictures
from experiments.report.commands import name_of
from experiments.report.documents import RESULTS, is_flat, label_of, problems, read_all, read_result, superseded
from experiments.report.figures import Results, devices
from experiments.report.markdown import slug
from experiments.report.standing import claim_rows
from experiments.results_page import PAGE, texts
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


def test_what_is_simulated_is_said_of_the_device_whose_steps_it_has(tmp_path):
    """Where a row names none, of the cost model's; and of the machine too where that timed the scheduler."""
    rows = [{"source": "simulated"}, {"source": "measured", "measured_on": "NVIDIA H100"}, {"error": "no room"}]
    for name, found in (
        ("claims-C23", rows[:1]), ("claims-C24", rows), ("claims-C25", [rows[0] | {"steps_of": "NVIDIA H100"}]),
        ("claims-C20", [{"source": "data sheet", "device": "A"}, rows[1]]),
        ("simulate_x", [rows[0] | {"host_us": 1.0}]), ("claims-C9", [{"part": "model"}]),
    ):  # fmt: skip
        write(tmp_path, f"{name}-20261120-cpu", experiment=name, device="cpu", rows=found, complete=False)
    devices = {entry.label: [documents.short(each) for each in entry.devices] for entry in read_all(tmp_path)}
    assert devices == {
        "claims-C23": ["simulated H200"],
        "claims-C24": ["simulated H200", "H100"],
        "claims-C25": ["simulated H100"],
        "claims-C20": ["data sheets", "H100"],
        "simulate_x": ["CPU", "simulated H200"],
        "claims-C9": ["CPU"],
    }
    text = page(tmp_path, "claims")
    assert re.search(r"^\| \[Claim C23: .* \| simulated H200 \| 2026-11-20, incomplete \|$", text, re.MULTILINE)
    assert "cpu, figures of one simulated NVIDIA H200 and one NVIDIA H100, 2026-11-20" in text
    assert "cpu, figures of data sheets and one NVIDIA H100, 2026-11-20" in text


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


def test_rows_that_are_of_other_files_name_files_that_are_there():
    """But of the one whose simulator knew steps of a day before."""
    named = {
        (path.stem, name)
        for path in RESULTS.glob("*.json")
        for name in re.findall(r"[\w.-]+-\d{8}[\w-]*\.json", path.read_text(encoding="utf-8"))
    }
    gone = {pair for pair in named if not (RESULTS / pair[1]).exists()}
    assert gone == {("kv_measured-20261127-h200", "decode_step-20261122-h200.json")}


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
    assert said("python -m experiments.load_memory --label x 64") == "load_memory-x"
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
    starts += [{"start": "cold", "start_s": 31.2, "processes": 8}]
    write(tmp_path, "start_up-20261120-h200", experiment="start_up", rows=starts)
    text = page(tmp_path)
    assert "| 35.1 requests a second |" in text
    assert "| 58.9 s cold, 1.8 s warm, 31.2 s cold with 8 processes |" in text


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
            "arrivals_s": 12.0,
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
    assert "of the model mine" not in short(tmp_path), "both say the same"
    rows[0] |= {"times": 1.0, "added": 0.1, "kl": 1.0}
    write(tmp_path, "claims-C6-mine", experiment="claims-C6-mine", rows=rows)
    assert "**; of the model mine: " in short(tmp_path)


def test_devices_whose_steps_were_timed_beside_a_peer_come_first_then_the_newest(tmp_path):
    ours, beside = [{}], [{"peer": "x"}]
    for name, device, day, rows in (
        ("throughput", "A", 22, ours), ("throughput", "B", 20, beside), ("throughput", "C", 21, beside),
        ("qps", "D", 25, beside), ("qps", "cpu", 27, ours),
    ):  # fmt: skip
        write(tmp_path, f"{name}_llama-2-7b_x-202611{day}-{device}", device=device, date=f"2026-11-{day}", rows=rows)
    assert devices(Results(read_all(tmp_path))) == ["C", "B", "D", "A"]


def test_what_was_measured_answers_a_claim_before_what_is_simulated(tmp_path):
    """Of whatever day the simulation is; a run that was cut off answers only where nothing else does."""
    verdict = {"stated": "more", "measured": "Yes: more", "verdict": "yes"}
    measured, simulated = ([{"part": "check"} | more, verdict] for more in ({}, {"source": "simulated"}))

    def answer() -> str:
        ((_, entry),) = claim_rows(Results(read_all(tmp_path)))
        return entry.path.stem

    experiment = "claims-C26"
    write(tmp_path, "claims-C26-cut-20261120-h200", experiment=experiment, complete=False, rows=measured)
    assert answer() == "claims-C26-cut-20261120-h200"
    write(tmp_path, "claims-C26-20261127-cpu", experiment=experiment, device="cpu", date="2026-11-27", rows=simulated)
    assert answer() == "claims-C26-20261127-cpu"
    write(tmp_path, "claims-C26-20261120-h200", experiment=experiment, rows=measured)
    assert answer() == "claims-C26-20261120-h200"


def test_every_device_that_answers_a_claim_has_a_row(tmp_path):
    """Of one file or of several; a device's newest complete file counts."""
    verdict = {"stated": "large", "measured": "Yes: large", "verdict": "yes"}

    def steps(device, int4_ms):
        of = {"kv": "bf16", "batch": 1, "measured_on": f"NVIDIA {device}"}
        times = (("bf16", 4.0), ("w4a16-g128", int4_ms))
        return [of | {"scheme": scheme, "decode_ms": ms, "over_bf16": 4 / ms} for scheme, ms in times]

    def rows_of(claim):
        return [line.split(" | ")[-2:] for line in short(tmp_path).splitlines() if f"[{claim}]" in line]

    rows = [*steps("H100", 1.0), *steps("H200", 4.0), verdict]
    write(tmp_path, "claims-C8-20261120-cpu", experiment="claims-C8", device="cpu", rows=rows)
    assert rows_of("C8") == [["H200", "**no** |"], ["H100", "**partly** |"]]
    (tmp_path / "claims-C8-20261120-cpu.json").unlink()
    for device, day, complete, ms in (
        ("H100", 20, True, 1.0), ("H200", 21, True, 4.0), ("H200", 22, False, 1.0), ("H100", 19, True, 4.0),
    ):  # fmt: skip
        about = {"device": f"NVIDIA {device}", "date": f"2026-11-{day}", "complete": complete}
        rows = [*steps(device, ms), verdict]
        write(tmp_path, f"claims-C8-202611{day}-{device}", experiment="claims-C8", rows=rows, **about)
    assert rows_of("C8") == [["H200", "**no** |"], ["H100", "**partly** |"]]
    write(
        tmp_path,
        "claims-C8-20261121-H200",
        experiment="claims-C8",
        date="2026-11-21",
        rows=[*steps("H200", 1), verdict],
    )
    assert rows_of("C8") == [["H200", "**partly** |"]], "both say the same"


@pytest.mark.parametrize(
    ("claim", "recorded"),
    [
        ("C7", lambda: [*c7.products(RESULTS), *c7.steps(RESULTS)]),
        ("C8", lambda: c8.recorded(RESULTS)),
        ("C30", lambda: c30.recorded(RESULTS)),
    ],
)
def test_a_published_answer_is_of_the_files_that_its_command_reads(claim, recorded):
    (entry,) = [entry for name, entry in claim_rows(Results(read_all())) if name == claim]
    published = [row for row in entry.rows if "file" in row]
    assert published == [{"claim": claim} | row for row in recorded()], f"python -m experiments.claims {claim} --record"


def test_every_partly_says_what_is_yes_and_what_is_not():
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
        assert "Yes" in kinds and len(kinds) > 1 if line in partly else len(kinds) == 1, line
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
    assert "so far: 8 requests at once. Yes: more requests a second, +20.0 %" in page(tmp_path, "claims")
    assert "**incomplete**" in short(tmp_path)
    verdict = {"stated": "more", "measured": "Yes: more", "verdict": "yes"}
    write(tmp_path, "older", experiment="claims-C1", date="2026-11-01", rows=[*rows, verdict])
    assert "**incomplete**" not in short(tmp_path), "a run that was cut off took the place of one that answers"
    (tmp_path / "older.json").unlink()
    write(tmp_path, "x", experiment="claims-C1", rows=rows, complete=False, size="toy")
    assert "so far" not in page(tmp_path, "claims")


def test_what_a_file_does_not_hold_of_its_run_is_said(tmp_path):
    clocks = {"sm": 1755, "most_sm": 1980, "memory": 3201}
    write(tmp_path, "x-20261120-h200", commit="abc", driver="570", clocks_mhz=clocks)
    text = page(tmp_path, "kernels")
    assert ", commit abc, driver 570, clocks 1755 of 1980 MHz, memory 3201" in text
    assert "recorded" not in text
    host = {"cores": 64, "own_cores": 12, "load": 28.4, "load_after": 51.6}
    write(tmp_path, "x-20261120-h200", commit="abc", host=host)
    assert ", commit abc, on 12 of 64 cores, load 51.6, no driver or clocks recorded" in page(tmp_path, "kernels")
    write(tmp_path, "x-20261120-h200", commit="abc", host={"cores": 2, "own_cores": 2, "load": None})
    assert ", on 2 of 2 cores, no driver" in page(tmp_path, "kernels")
    write(tmp_path, "x-20261120-h200", commit="abc")
    assert ", commit abc, no driver or clocks recorded" in page(tmp_path, "kernels")
    write(tmp_path, "x-20261120-h200", amended="run without its label")
    assert "; run without its label\n" in page(tmp_path, "kernels")


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
