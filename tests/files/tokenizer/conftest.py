"""Each kind of tokenizer, as files and loaded."""

from pathlib import Path

import pytest

from jllm.files.tokenizer import Tokenizer, load_tokenizer
from tests.files.tokenizer.cases import KINDS, byte_fallback, byte_level, train_sentencepiece


@pytest.fixture(scope="session")
def folders(tmp_path_factory) -> dict[str, Path]:
    made = {kind: tmp_path_factory.mktemp(kind) for kind in KINDS}
    train_sentencepiece(made["sentencepiece"])
    byte_level().save(str(made["byte_level"] / "tokenizer.json"))
    byte_fallback().save(str(made["byte_fallback"] / "tokenizer.json"))
    return made


@pytest.fixture(scope="session")
def loaded(folders) -> dict[str, Tokenizer]:
    return {kind: load_tokenizer(folder) for kind, folder in folders.items()}
