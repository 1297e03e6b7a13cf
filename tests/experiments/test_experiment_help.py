"""Every option of every experiment and benchmark says what it is for, and what it is by default."""

import argparse
import importlib
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
COMMANDS = sorted(
    path
    for folder in ("experiments", "pallas_kernels")
    for path in (ROOT / folder).rglob("*.py")
    if "def main(argv: " in path.read_text(encoding="utf-8")
)
LIMITED = re.compile(r'"--seeds?",\s+\w|\("seed"|"--pool-gib"')
DRAWN = [path for path in COMMANDS if LIMITED.search(path.read_text(encoding="utf-8"))]


def parsers(parser: argparse.ArgumentParser) -> Iterator[argparse.ArgumentParser]:
    """A parser and those of its subcommands."""
    yield parser
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            for each in action.choices.values():
                yield from parsers(each)


def name_of(path: Path) -> str:
    return str(path.relative_to(ROOT))


def parsers_of(path: Path, monkeypatch) -> list[argparse.ArgumentParser]:
    """A command's parser and those of its subcommands."""
    if path.name.startswith("train_"):
        pytest.importorskip("optax")
    command = importlib.import_module(".".join(path.relative_to(ROOT).with_suffix("").parts))
    found: list[argparse.ArgumentParser] = []

    def take(parser: argparse.ArgumentParser, *_: object) -> None:
        found.append(parser)
        raise SystemExit

    monkeypatch.setattr(argparse.ArgumentParser, "parse_args", take)
    with pytest.raises(SystemExit):
        command.main([])
    return list(parsers(found[0]))


@pytest.mark.parametrize("path", COMMANDS, ids=name_of)
def test_every_option_has_help_and_tells_its_default(path, monkeypatch):
    for parser in parsers_of(path, monkeypatch):
        parser.format_help()  # no % that argparse would take for its own
        for action in parser._actions:
            name = action.option_strings or action.dest
            assert action.help or isinstance(action, argparse._SubParsersAction), f"{name} has no help"
            if not isinstance(action.default, bool) and action.default not in (None, [], argparse.SUPPRESS):
                shown = parser._get_formatter()._expand_help(action)
                assert action.help == argparse.SUPPRESS or "default" in shown, f"{name} does not tell its default"


@pytest.mark.parametrize("path", DRAWN, ids=name_of)
def test_seeds_and_sizes_that_nothing_holds_are_refused(path, monkeypatch):
    most = {"--seed": 2**32 - 1, "--seeds": 2**32 - 1, "--pool-gib": 2**33}
    actions = [action for parser in parsers_of(path, monkeypatch) for action in parser._actions]
    limited = [(action, most[name]) for action in actions for name in action.option_strings if name in most]
    assert limited
    for action, greatest in limited:
        assert action.type(str(greatest)) == greatest
        for text in (str(greatest + 1), "1e300", "-1"):
            with pytest.raises(argparse.ArgumentTypeError, match=str(greatest)):
                action.type(text)
