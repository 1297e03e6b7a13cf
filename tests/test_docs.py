"""README.md and docs/ say what runs: their blocks of Python do, and their commands exist and take their options."""

import argparse
import builtins
import contextlib
import importlib
import importlib.util
import re
import runpy
import shlex
import symtable
import sys
from dataclasses import replace
from pathlib import Path

import pytest

import jllm

ROOT = Path(__file__).parent.parent
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
MODULE = r"python -m ((?:jllm|experiments|pallas_kernels)[\w.]*)"
COMMAND = re.compile(rf"(?:{MODULE}|(?:^|\| )(jllm)(?= \w))((?: [^`\n|&#]*)?)", re.MULTILINE)
SAID = {"extending": "swim"}  # what a page says that its blocks print
WALKS = {"a-request"}  # pages whose blocks go on from one another, and show what each prints
LINK = re.compile(r"\]\((?!http|#)([^)#]+)")


def slug(title: str) -> str:
    """GitHub's anchor of a heading."""
    return re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-")


def blocks(page: Path, language: str) -> list[str]:
    found = re.findall(r"^```(\w*)\n(.*?)^```$", page.read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL)
    return [body for name, body in found if name == language]


class Parsed(Exception):
    pass


def commands(page: Path) -> list[tuple[str, str]]:
    """Modules and their arguments, from blocks and from the text, whose lines may break anywhere."""
    text = page.read_text(encoding="utf-8")
    prose = re.sub(r"^```.*?^```", "", text, flags=re.MULTILINE | re.DOTALL)
    spans = [*blocks(page, "sh"), *(" ".join(span.split()) for span in re.findall(r"`([^`]+)`", prose))]
    found = [match for span in spans for match in COMMAND.findall(span)]
    return [(module or script, arguments) for module, script, arguments in found if arguments.strip() != "eval"]


def shallow(*given, load=jllm.load, **options) -> jllm.Model:
    """Loads a model and keeps two of its layers, whose steps compile in a third of the time."""
    model = load(*given, **options)
    config = replace(model.config, num_layers=2)
    return replace(model, config=config, params=replace(model.params, layers=model.params.layers[:2]))


@pytest.mark.parametrize("page", [page for page in PAGES if blocks(page, "python")], ids=lambda page: page.stem)
def test_python_runs(page, tmp_path, monkeypatch, capsys):
    """Takes whole models where a page says what they write, of which a block names a later layer."""
    monkeypatch.chdir(tmp_path)
    names: dict = {}
    load = jllm.load
    for block in blocks(page, "python"):
        whole = page.stem in WALKS or (page.stem in SAID and "layers.3" in block)
        monkeypatch.setattr(jllm, "load", load if whole else shallow)
        if page.stem not in WALKS:
            names = {}
        exec(compile(block, str(page), "exec"), names)
    printed = capsys.readouterr().out
    assert SAID.get(page.stem, "") in printed
    if page.stem in WALKS:
        assert "".join(blocks(page, "")[1:]) == printed


def undefined(code: str) -> set[str]:
    """The names that a block takes from elsewhere."""
    table = symtable.symtable(code, "block", "exec")
    tables = [table]
    for each in tables:
        tables += each.get_children()
    used = {
        s.get_name() for t in tables for s in t.get_symbols() if s.is_referenced() and (s.is_global() or t is table)
    }
    made = {s.get_name() for s in table.get_symbols() if s.is_assigned() or s.is_imported() or s.is_namespace()}
    return used - made - {*dir(builtins)}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_blocks_that_need_other_machines_can_be_pasted_alone(page):
    for block in blocks(page, ""):
        with contextlib.suppress(SyntaxError):  # of another language
            assert not undefined(block)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_what_is_to_be_installed_goes_into_an_environment_of_uv(page):
    for block in blocks(page, "sh"):
        assert not re.findall(r"^pip install", block, re.MULTILINE)


@pytest.mark.filterwarnings("ignore:.*found in sys.modules:RuntimeWarning")  # another test imported it
@pytest.mark.parametrize("page", [page for page in PAGES if commands(page)], ids=lambda page: page.stem)
def test_commands_take_their_options(page, monkeypatch):
    parse = argparse.ArgumentParser.parse_args

    def parse_only(self, args=None, namespace=None):
        parse(self, args, namespace)
        raise Parsed

    monkeypatch.setattr(argparse.ArgumentParser, "parse_args", parse_only)
    for module, arguments in commands(page):
        assert importlib.util.find_spec(module) is not None, f"{page.name}: {module}"
        if module == "jllm.analysis.lm_eval":  # lm-eval's own command parses these
            continue
        monkeypatch.setattr(sys, "argv", [module, *shlex.split(arguments.replace("...", ""))])
        with pytest.raises(Parsed):
            runpy.run_module(module, run_name="__main__")


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_sections_that_links_name_are_there(page):
    for path, anchor in re.findall(r"\]\((?!http)([^)#]*)#([^)]+)\)", page.read_text(encoding="utf-8")):
        file = page.parent / path if path else page
        if file.suffix == ".md":
            headings = re.findall(r"^#+ (.*)$", file.read_text(encoding="utf-8"), re.MULTILINE)
            assert anchor in {slug(heading) for heading in headings}, f"{file.name}#{anchor}"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_links_and_paths_are_there(page):
    text = page.read_text(encoding="utf-8")
    missing = [link for link in LINK.findall(text) if not (page.parent / link).exists()]
    files = re.findall(r"`((?:jllm|pallas_kernels|experiments|tests)/[\w/.]+)`", text)
    assert not missing + [file for file in files if not (ROOT / file).exists()]


def test_the_readme_is_short():
    assert len((ROOT / "README.md").read_text(encoding="utf-8").splitlines()) <= 120
