"""A prefix cache on disk that several engines share: K and V of what prompts begin with, in files.

    store = KVStore("/shared/kv", max_bytes=100 << 30)
    engine = StoringEngine(model, store, max_slots=64)     # in each process

A file has a block of tokens, and its name is a digest of the model, the KV formats and all tokens up to the block's
end: so what one engine computed is found by every other with the same model, on any page size, and nothing else is
ever taken for it. Files appear by rename, whole. A store that is full, unreadable or damaged costs one line on the way,
never a request: what cannot be had is computed.
"""

import os
import time
import warnings
from collections.abc import Collection, Iterable, Sequence
from contextlib import suppress
from dataclasses import replace
from hashlib import sha256
from pathlib import Path
from typing import TYPE_CHECKING, Any, Unpack

import jax
import numpy as np

from jllm import fingerprint
from jllm.engine.checks import Prompt
from jllm.engine.engine import Engine
from jllm.engine.options import EngineKeywords
from jllm.engine.request import Event, SamplingParams
from jllm.errors import ConfigError, OutputError, RequestError, SnapshotError
from jllm.model import Cache
from jllm.snapshot import Snapshot, load, save
from pallas_kernels.kv_formats import KVFormat
from pallas_kernels.kv_pages import KVPages, Pages

if TYPE_CHECKING:
    from jllm.pretrained import Model

BLOCK = 256  # tokens of a file
SUFFIX = ".kv"


class KVStore:
    """A folder of blocks. `max_bytes`: what they may take together; the least recently used go first. Raises
    ConfigError where there can be no such folder."""

    def __init__(self, folder: str | os.PathLike, max_bytes: int | None = None, block: int = BLOCK):
        self.folder, self.max_bytes, self.block = Path(folder), max_bytes, block
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise ConfigError(f"{folder} cannot be a store of K and V: {error.strerror}") from None

    def find(self, tokens: Sequence[int], about: str, formats: Iterable[KVFormat] = ()) -> Snapshot | None:
        """K and V of as many first blocks of `tokens` as there are, as a snapshot with all of the tokens; None for
        none. `about` is what K and V depend on besides tokens. A block that is damaged is removed, with a warning."""
        found: list[Snapshot] = []
        blocks = self._blocks(tokens, about)
        for path, block in blocks:
            if not os.path.exists(path):
                break
            try:
                one = load(path, formats)
                if np.asarray(one.tokens).tolist() != block or (found and _kinds(one) != _kinds(found[0])):
                    raise SnapshotError(f"{path}: has other tokens or formats than its name says")
            except (SnapshotError, OSError) as error:
                warnings.warn(f"a block of stored K and V is computed again: {error}", stacklevel=2)
                with suppress(OSError):
                    path.unlink()
                break
            found.append(one)
        _touch([path for path, _ in blocks[: len(found)]])
        if not found:
            return None
        cache = jax.tree.map(lambda *parts: np.concatenate(parts, axis=2), *(one.cache for one in found))
        return Snapshot(np.asarray(tokens, np.int32), cache, found[0].weights)

    def lacks(self, tokens: Sequence[int], about: str) -> bool:
        """Whether a full block of these is not there."""
        return any(not os.path.exists(path) for path, _ in self._blocks(tokens, about))

    def keep(self, snapshot: Snapshot, about: str) -> None:
        """Writes the blocks of a snapshot that are not there, as many first ones as there may be room for. Where it
        cannot, a warning says why."""
        blocks = self._blocks(np.asarray(snapshot.tokens)[: snapshot.length].tolist(), about)
        chain = [path for path, _ in blocks]
        for i, (path, block) in enumerate(blocks):
            if os.path.exists(path):
                continue
            span = slice(i * self.block, (i + 1) * self.block)
            one = Snapshot(np.asarray(block, np.int32), _span(snapshot.cache, span), snapshot.weights)
            own = path.with_suffix(f"{SUFFIX}-{os.getpid()}-{time.monotonic_ns()}")
            try:
                if not self._make_room(sum(leaf.nbytes for leaf in jax.tree.leaves(one.cache)), set(chain)):
                    break
                save(own, one)
                os.replace(own, path)
            except OSError as error:  # OutputError is one
                with suppress(OSError):
                    own.unlink()
                warnings.warn(f"K and V are not stored: {error}", stacklevel=2)
                break
        _touch(chain)

    def _blocks(self, tokens: Sequence[int], about: str) -> list[tuple[Path, list[int]]]:
        """The file of each full block, and its tokens."""
        found, name = [], sha256(f"{about} {self.block}".encode()).digest()
        for end in range(self.block, len(tokens) + 1, self.block):
            block = [int(token) for token in tokens[end - self.block : end]]
            name = sha256(name + np.asarray(block, np.int32).tobytes()).digest()
            found.append((self.folder / (name.hex() + SUFFIX), block))
        return found

    def _make_room(self, nbytes: int, chain: Collection[Path]) -> bool:
        """For one more block, of others than those of its own chain; returns whether there can be. What writers that
        died have left counts, and goes, as blocks do. OutputError where the block alone is too large."""
        if self.max_bytes is None:
            return True
        if nbytes > self.max_bytes:
            raise OutputError(f"{self.folder} may take {self.max_bytes} bytes, and a block has {nbytes}")
        there = [
            (stat.st_mtime_ns, stat.st_size, path) for path in self.folder.glob(f"*{SUFFIX}*") if (stat := _stat(path))
        ]
        others = sorted(one for one in there if one[2] not in chain)
        total = nbytes + sum(size for _, size, _ in there)
        if total - sum(size for _, size, _ in others) > self.max_bytes:
            return False
        for _, size, path in others:
            if total <= self.max_bytes:
                break
            path.unlink(missing_ok=True)
            total -= size
        return True


def _stat(path: Path) -> os.stat_result | None:
    """None for a file that another process has just removed."""
    try:
        return path.stat()
    except OSError:
        return None


def _touch(chain: Sequence[Path]) -> None:
    """These blocks were used. Each is a microsecond newer than the next one, which is of no use without it, and so
    goes first. In a folder where one may only read they stay as they are."""
    now = time.time_ns()
    for i, path in enumerate(chain):
        with suppress(OSError):
            os.utime(path, ns=(now - 1000 * i, now - 1000 * i))


def _kinds(snapshot: Snapshot) -> Any:
    layer = snapshot.cache[0]
    return snapshot.weights, layer.k.format, layer.v.format, len(snapshot.cache)


def _span(cache: Cache, tokens: slice) -> Cache:
    """These tokens of a snapshot's cache."""

    def one(pages: Pages) -> Pages:
        scales = pages.scales
        if scales is not None:
            numbers = pages.format.numbers(pages.head_dim)
            scales = scales[:, :, tokens.start * numbers : tokens.stop * numbers]
        return replace(pages, values=pages.values[:, :, tokens], scales=scales)

    return tuple(KVPages(one(layer.k), one(layer.v)) for layer in cache)


class StoringEngine(Engine):
    """An Engine that looks into a store for what a prompt begins with, and puts there what it has computed once the
    first token has come, unless that was the last. Requests that need their prompt computed (its log-probabilities,
    penalties) don't look."""

    def __init__(self, model: "Model", store: KVStore, **options: Unpack[EngineKeywords]):
        about = fingerprint.of_model(model.params, model.config)
        super().__init__(model, **options)
        self._store, self._to_keep = store, dict[int, tuple[int, ...]]()
        self.stored_tokens = 0  # of prompts, that were found there
        layer = self._device._state.cache[0]  # type: ignore[union-attr]
        self._about = f"{about} {layer.k.format.name} {layer.v.format.name}"
        own = self._options.kv_cache
        self._formats = () if isinstance(own, str | None) else (own,) if isinstance(own, KVFormat) else own

    def submit(
        self,
        prompt: Prompt,
        sampling: SamplingParams = SamplingParams(),
        *,
        priority: int = 0,
        deadline: float | None = None,
    ) -> int:
        """As Engine.submit."""
        ids = self.check(prompt, sampling)
        urgency: dict[str, Any] = {"priority": priority, "deadline": deadline}
        may_skip = not (sampling.prompt_logprobs or sampling.counts_tokens)
        found = self._store.find(ids, self._about, self._formats) if may_skip else None
        if found is None:
            name = super().submit(ids, sampling, **urgency)
        else:
            self.stored_tokens += self._whole(min(found.length, len(ids) - 1))
            name = self.resume(found, sampling, share=True, **urgency)
        if self._store.lacks(ids[: self._whole(len(ids))], self._about):
            self._to_keep[name] = tuple(ids)
        return name

    def step(self) -> list[Event]:
        """As Engine.step; a step after which K and V are stored waits for the device, and for the disk."""
        events = super().step()
        for event in events:
            ids = self._to_keep.pop(event.id, None)
            if ids is not None and event.completion is None:
                self._keep(event, ids)
        return events

    def _whole(self, tokens: int) -> int:
        """How many of a sequence's first tokens can leave their slot."""
        return self._scheduler.sharing.whole(tokens)

    def _keep(self, event: Event, ids: tuple[int, ...]) -> None:
        try:
            value = self.snapshot(event.id, event.sample)
        except RequestError:
            return  # it ended meanwhile
        if value.length >= self._whole(len(ids)):
            self._store.keep(value, self._about)
