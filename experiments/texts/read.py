"""Reads texts for experiments: a .jsonl of documents, any other file as one document, or a published text by name."""

import json
from pathlib import Path

from jllm.errors import InputFileError

BUNDLED_TEXT = Path(__file__).parent / "fairytale.jsonl"  # by the bundled model, see README.md beside it
PUBLISHED = {"wikitext": ("Salesforce/wikitext", "wikitext-2-raw-v1", "test")}  # dataset, subset and split on the Hub


def read_documents(file: Path) -> list[str]:
    """Returns the "text" of each line of a .jsonl, or a whole UTF-8 file as one. Raises InputFileError, with the
    line. A name of PUBLISHED is a text of the Hub, unless a file is called so."""
    if _is_published(file):
        return [_published(str(file))]
    try:
        text = file.read_text(encoding="utf-8-sig")
    except OSError as error:
        raise InputFileError(f"{file}: cannot be read: {error.strerror}") from None
    except UnicodeDecodeError as error:
        raise InputFileError(f"{file}: is not UTF-8: byte {error.start}") from None
    if file.suffix != ".jsonl":
        return [text]
    found = [_document(f"{file}:{i}", line) for i, line in enumerate(text.split("\n"), 1) if line.strip()]
    if not found:
        raise InputFileError(f"{file}: has no documents")
    return found


def usual_protocol(file: Path, documents: list[str], context: int) -> str:
    """Returns the protocol for a text, if none is asked for: GPTQ's where the text is its own and fits `context`."""
    if _is_published(file) and context >= 2048:
        return "wikitext2-2048"
    return "document" if len(documents) > 1 else "windows-512"


def _is_published(file: Path) -> bool:
    return str(file) in PUBLISHED and not file.is_file()


def _published(name: str) -> str:
    """Returns a published text, its lines joined as GPTQ's code joins them (arXiv 2210.17323)."""
    try:
        from datasets import load_dataset
    except ImportError:
        raise InputFileError(f"--text {name} needs the package datasets: install the extra eval") from None
    source, subset, split = PUBLISHED[name]
    try:
        lines = load_dataset(source, subset, split=split)["text"]
    except (OSError, ValueError) as error:  # no network, or no such dataset
        why = str(error).partition("\n")[0].rstrip(".")
        raise InputFileError(f"--text {name}: {source} cannot be read: {why}; a file's path works offline") from None
    return "\n\n".join(lines)


def _document(where: str, line: str) -> str:
    try:
        document = json.loads(line)
    except ValueError as error:
        raise InputFileError(f"{where}: not valid JSON: {error}") from None
    if not isinstance(document, dict) or not isinstance(document.get("text"), str):
        raise InputFileError(f'{where}: expected {{"text": "..."}}, one document a line')
    return document["text"]
