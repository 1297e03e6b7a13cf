"""Every option of every experiment and benchmark says what it is for, and what it is by default."""

import argparse
import importlib
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
COMMANDS = sorted(
    path
    for folder in ("experiments", "pallas_kernels")
    for path in (ROOT / folder).rglob("*.py")
    if "def main(argv: " in path.read_text(encoding="utf-8")
)


def parsers(parser: argparse.ArgumentParser) -> Iterator[argparse.ArgumentParser]:
    """A parser and those of its subcommands."""
    yield parser
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            for each in action.choices.values():
                yield from parsers(each)


@pytest.mark.parametrize("path", COMMANDS, ids=lambda path: str(path.relative_to(ROOT)))
def test_every_option_has_help_and_tells_its_default(path, monkeypatch):
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
    for parser in parsers(found[0]):
        parser.format_help()  # no % that argparse would take for its own
        for action in parser._actions:
            name = action.option_strings or action.dest
            assert action.help or isinstance(action, argparse._SubParsersAction), f"{name} has no help"
            if not isinstance(action.default, bool) and action.default not in (None, [], argparse.SUPPRESS):
                shown = parser._get_formatter()._expand_help(action)
                assert action.help == argparse.SUPPRESS or "default" in shown, f"{name} does not tell its default"
