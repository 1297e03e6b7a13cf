"""Finds the files of a checkpoint directory and their tensors, and names new files once all are complete."""

import contextlib
import json
import os
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import BinaryIO

from jllm.errors import CheckpointError, OutputError
from jllm.files.gguf.reader import ROPE_FACTORS, is_gguf, read_gguf
from jllm.files.safetensors_io import StoredTensor, check_fetched, read_header
from jllm.files.stored_names import by_our_names
from jllm.model.params import layer_prefix

WEIGHTS, INDEX = "model.safetensors", "model.safetensors.index.json"
SMALL = (  # files that are read if they are there
    *("config.json", "generation_config.json", "tokenizer_config.json", "special_tokens_map.json"),
    *("added_tokens.json", "chat_template.json", "chat_template.jinja"),
)
BLOCK = 64 << 20  # bytes read or written at a time
SHARD = re.compile(r"model-\d+-of-\d+\.safetensors")
HUB_ID = re.compile(r"[A-Za-z0-9_][\w.-]*(/[A-Za-z0-9_][\w.-]*)?")
LAYER = re.compile(re.escape(layer_prefix(0)).replace("0", r"(\d+)"))


def find_model(path_or_id: str | Path) -> Path:
    """Returns a model's directory, or its GGUF file. A local one is returned as it is. Any other name is a Hugging Face
    Hub id, which is downloaded once and cached.

    Raises CheckpointError, in one line, for a name that is neither, or a model that cannot be downloaded now.
    """
    path, name = Path(path_or_id).expanduser(), str(path_or_id)
    if not name.strip():
        raise CheckpointError("the model's name is empty: give a directory, or an id of the Hugging Face Hub")
    if path.is_dir():
        _check_folder(path)
        return path
    if is_gguf(path):
        return path
    if path.exists():
        known = f"a directory with config.json and {WEIGHTS}, or a .gguf file"
        raise CheckpointError(f"{name}: is not a directory; a model is {known}")
    if not HUB_ID.fullmatch(name) or path.suffix == ".gguf":
        raise CheckpointError(f"{name}: no such {'file' if path.suffix == '.gguf' else 'directory'}")
    import huggingface_hub
    from huggingface_hub import errors

    wanted = ["model*.safetensors", "gptq_model*.safetensors", "*.json", "*.model", "*.jinja"]
    try:
        found = huggingface_hub.snapshot_download(name, allow_patterns=wanted, ignore_patterns=["*/*"], etag_timeout=5)
    except errors.GatedRepoError:
        problem = "is gated: accept its terms on the Hub and log in with `hf auth login`"
    except errors.RepositoryNotFoundError:
        problem = "is not a model of the Hugging Face Hub, or a private one without log-in"
    except errors.LocalEntryNotFoundError as error:
        problem = (
            f"is not in the local cache, and the Hugging Face Hub cannot be reached ({error.__cause__ or 'offline'})"
        )
    except Exception as error:  # the network, the proxy or the disk may raise anything
        problem = f"could not be downloaded: {type(error).__name__}: {str(error).strip().partition(chr(10))[0]}"
    else:
        return Path(found)
    raise CheckpointError(f"{name}: no such directory; as a Hub id it {problem}")


def _check_folder(path: Path) -> None:
    """Raises CheckpointError for a folder that only contains a model's folder, as in the Hub's cache. Raises it for
    files that Git LFS has not fetched, too."""
    vocabulary = "tokenizer.json" if (path / "tokenizer.json").exists() else "tokenizer.model"
    for file in (path / name for name in (vocabulary, *SMALL)):
        if file.is_file():
            check_fetched(file)
    if (path / "config.json").exists():
        return
    with contextlib.suppress(OSError):
        newest = path / "snapshots" / (path / "refs" / "main").read_text().strip()
        if newest.is_dir():
            raise CheckpointError(f"{path}: is a folder of the Hub's cache: the model is in {newest}")
    for pattern in ("snapshots/*/config.json", "*/config.json", "*/snapshots/*/config.json"):
        if inner := sorted(path.glob(pattern)):
            raise CheckpointError(f"{path}: has no config.json: did you mean the model in {inner[0].parent}?")


def stored_tensors(path: Path) -> dict[str, StoredTensor]:
    """Returns all tensors of a checkpoint directory by their names in Params, without prefixes that files add. It reads
    the single file, or the shards that the index lists. `path` may be a GGUF file."""
    if is_gguf(path):
        return {name: tensor for name, tensor in read_gguf(path).tensors.items() if name != ROPE_FACTORS}
    stored = _tensors_of(path)
    try:
        return by_our_names(stored)
    except CheckpointError as error:
        raise CheckpointError(f"{path}: {error}") from None


def _tensors_of(path: Path) -> dict[str, StoredTensor]:
    if not path.is_dir():
        raise CheckpointError(f"{path}: {'is not a directory' if path.exists() else 'no such directory'}")
    names = sorted(file.name for file in path.iterdir())
    shards = [name for name in names if SHARD.fullmatch(name)]
    if WEIGHTS in names and shards:
        raise CheckpointError(f"{path}: has both {WEIGHTS} and {shards[0]}; which of them is the model? Remove one")
    if INDEX in names:  # it may list a single file
        return _sharded_tensors(path)
    if WEIGHTS in names:
        return read_header(path / WEIGHTS)
    if shards:
        raise CheckpointError(f"{path}: has shards of safetensors, but no {INDEX} to list them")
    if (found := _of_another_name(path, names)) is not None:
        return found
    if other := [name for name in names if name.endswith((".bin", ".pth", ".pt", ".gguf", ".h5", ".msgpack"))]:
        gguf = f"give the file itself, {path / other[0]}"
        text = gguf if other[0].endswith(".gguf") else "convert the weights to safetensors"
        raise CheckpointError(f"{path}: has {other[0]}, but no {WEIGHTS}: {text}")
    raise CheckpointError(f"{path}: has neither {WEIGHTS} nor {INDEX}")


def _of_another_name(path: Path, names: Sequence[str]) -> dict[str, StoredTensor] | None:
    """Returns the tensors of the only index, or else of the only file, with an unusual name. Examples are AutoGPTQ's
    gptq_model-4bit-128g.safetensors and model.fp16.safetensors. Files of adapters and original weights don't count."""
    if indices := [name for name in names if name.endswith(".safetensors.index.json")]:
        files = indices
    else:
        files = [n for n in names if n.endswith(".safetensors") and not n.startswith(("adapter_", "consolidated"))]
    if len(files) > 1:
        missing = f"neither {WEIGHTS} nor {INDEX}; which of them is the model? Keep one, or the index of its shards"
        raise CheckpointError(f"{path}: has {files[0]} and {files[1]}, but {missing}")
    if not files:
        return None
    return _sharded_tensors(path, files[0]) if indices else read_header(path / files[0])


def count_layers(stored: Iterable[str]) -> int:
    """Counts the layers of these tensors, by their names."""
    found = [int(match[1]) for match in map(LAYER.match, stored) if match]
    return 1 + max(found, default=-1)


def _sharded_tensors(path: Path, name: str = INDEX) -> dict[str, StoredTensor]:
    index = path / name
    check_fetched(index)
    try:
        weight_map = json.loads(index.read_text(encoding="utf-8-sig"))["weight_map"]
        files = sorted(set(weight_map.values()))
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError):
        raise CheckpointError(f"{index}: not a readable index: a JSON object with a weight_map is needed") from None
    if odd := [file for file in files if not isinstance(file, str) or Path(file).name != file]:
        raise CheckpointError(f"{index}: {odd[0]!r} is not the name of a file beside it")
    if missing := [file for file in files if not (path / file).exists()]:
        raise CheckpointError(f"{path}: {len(missing)} of {len(files)} shards missing, the first is {missing[0]}")
    if WEIGHTS not in files and (path / WEIGHTS).exists():
        raise CheckpointError(f"{path}: has both {WEIGHTS} and {index.name}, which does not list it; remove one")
    if extra := sorted(f.name for f in path.iterdir() if SHARD.fullmatch(f.name) and f.name not in files):
        raise CheckpointError(f"{path}: shard {extra[0]} is not listed in {index.name}")
    tensors: dict[str, StoredTensor] = {}
    for file in files:
        for name, tensor in read_header(path / file).items():
            if weight_map.get(name) != file:
                where = f"places it in {weight_map[name]}" if name in weight_map else "does not list it"
                raise CheckpointError(f"{path / file}: holds tensor {name}, but {index.name} {where}")
            tensors[name] = tensor
    if missing := sorted(set(weight_map) - set(tensors)):
        raise CheckpointError(
            f"{path / weight_map[missing[0]]}: lacks tensor {missing[0]}, which {index.name} places in it"
        )
    return tensors


@contextlib.contextmanager
def all_or_nothing(directory: Path) -> Iterator[Callable[[str], BinaryIO]]:
    """Yields a function that creates files, which get their names once all are complete. An error before that leaves
    none.

    Each rename is one step: if the machine dies between two, old and new files are mixed. Files of the older checkpoint
    are removed only once all new ones are in place.
    """
    made_directory, made = not directory.exists(), []
    current, fate = directory, "nothing was saved"

    def create(name: str) -> BinaryIO:
        nonlocal current
        current = directory / name
        made.append(name)
        return (directory / f"{name}.partial").open("wb")

    try:
        directory.mkdir(parents=True, exist_ok=True)
        yield create
        for name in made:
            current = directory / name
            os.replace(directory / f"{name}.partial", current)
            fate = "files of two checkpoints may be mixed there: save again"
        for file in list(directory.iterdir()):  # a checkpoint that was here before must not mix with this one
            if (file.name in (WEIGHTS, INDEX) or SHARD.fullmatch(file.name)) and file.name not in made:
                file.unlink()
    except BaseException as error:
        for name in made:
            (directory / f"{name}.partial").unlink(missing_ok=True)
        if made_directory:
            with contextlib.suppress(OSError):
                directory.rmdir()
        if isinstance(error, OSError):
            raise OutputError(f"{current}: cannot be written: {error.strerror}; {fate}") from None
        raise
