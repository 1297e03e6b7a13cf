"""Reads texts for experiments: a .jsonl of documents, or any other file as one document."""

import json
from pathlib import Path

from jllm.errors import InputFileError

BUNDLED_TEXT = Path(__file__).parent / "fairytale.jsonl"  # by the bundled model, see README.md beside it


def read_documents(file: Path) -> list[str]:
    """Returns the "text" of each line of a .jsonl, or a whole UTF-8 file as one. Raises InputFileError, with the
    line."""
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


def _document(where: str, line: str) -> str:
    try:
        document = json.loads(line)
    except ValueError as error:
        raise InputFileError(f"{where}: not valid JSON: {error}") from None
    if not isinstance(document, dict) or not isinstance(document.get("text"), str):
        raise InputFileError(f'{where}: expected {{"text": "..."}}, one document a line')
    return document["text"]
