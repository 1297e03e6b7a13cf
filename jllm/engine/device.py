"""The device side of the loop: the state, and the compiled steps that it goes through."""

import warnings
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import replace
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import jax
import numpy as np

from jllm import fingerprint
from jllm.batch import Layout, Rung
from jllm.cache import make_cache, parse_kv_cache
from jllm.config import LlamaConfig
from jllm.engine.compiling import Compiled, Compiler, most_needed_first
from jllm.engine.executables import Executables, jax_cache_is_on
from jllm.engine.options import EngineOptions
from jllm.engine.request import SamplingParams
from jllm.engine.room import check_room, check_step, sizes_for
from jllm.errors import ConfigError, SnapshotError
from jllm.memory import Memory, free_memory
from jllm.model import Cache
from jllm.params import Params
from jllm.snapshot import Snapshot, check_fits, cut, gather_pages, scatter_pages_donated, split
from jllm.step import (
    COPIES,
    Outputs,
    State,
    Variant,
    jit_copy_pages,
    jit_step,
    make_penalties,
    make_slots,
)


class Device:
    """Owns the state, which every step takes and returns. Compiled steps live in jit_step's own cache, which engines
    over the same shapes share, or in files as well (options.executables) and here.

    memory tells how many bytes are free once the weights are there. Raises NoRoomError, before anything is allocated,
    where the options take more.
    """

    def __init__(self, config: LlamaConfig, params: Params, options: EngineOptions, memory: Memory = free_memory):
        self._config, self._params, self._backend = config, params, options.backend
        self._formats = parse_kv_cache(options.kv_cache, config, params.norm.dtype)
        self._page_size = options.page_size
        self._options, self._memory, self._free = options, memory, memory()
        self.sizes = sizes_for(options, config, params, self._free)
        self.used: set[tuple[Rung, Variant]] = set()  # the compiled steps that this engine needed
        self.compiled = Compiled()
        self._compiler: Compiler | None = None
        self._jobs: dict[tuple[Rung, Variant], Future] = {}  # what is being compiled
        self._files: Executables | None = None
        if options.executables is not None:
            self._files = make_files(Path(options.executables), params)
        self._programs: dict[tuple[Rung, Variant], jax.stages.Compiled] = {}  # those of files, or for them
        self._loaded: set[Path] = set()
        self.renew()

    def renew(self) -> None:
        """A fresh state: an empty page pool and empty slots. The old pool goes first, as there is room for one only. So
        do programs and their files: one that was loaded may be what failed."""
        self._state: State | None = None
        self._programs.clear()
        for path in self._loaded:
            path.unlink(missing_ok=True)
        self._loaded.clear()
        check_room(self._options, self._config, self._params, self._free)
        self._free = None  # later on there is as much as there was, but the device may not know it yet
        limits = self.sizes.limits
        cache = make_cache(self._config, limits.num_pages, limits.page_size, self._formats)
        self._state = State(cache, make_slots(limits.max_slots, self.sizes.max_pages))

    def close(self) -> None:
        """Drops everything that holds device memory, and waits for threads that compile."""
        self._stop_compiling()
        self._programs.clear()
        del self._params
        self._state = None

    def layout(self, rung: Rung, variant: Variant) -> Layout:
        return Layout(rung, self.sizes.limits.max_deltas, SamplingParams.MAX_LOGIT_BIAS if variant.penalties else 0)

    def run(self, buffer: np.ndarray, layout: Layout, variant: Variant) -> Outputs:
        """Dispatches one step without waiting for it; a copy of the outputs to the host is under way."""
        assert self._state is not None
        self._state = self._with_penalties(self._state, variant.penalties)
        self.used.add((layout.rung, variant))
        if self._files is None:
            self._state, outputs = jit_step(self._params, self._state, buffer, **self._static(layout, variant))
        else:
            self._state, outputs = self._program(layout.rung, variant)(self._params, self._state, buffer)
        for leaf in jax.tree.leaves(outputs):
            leaf.copy_to_host_async()
        return outputs

    def copy_pages(self, copies: Sequence[tuple[int, int]]) -> None:
        """Dispatches copies of pages (from, to), none of them both; they come after all steps dispatched so far."""
        assert self._state is not None
        for at in range(0, len(copies), COPIES):
            pages = np.full((COPIES, 2), np.iinfo(np.int32).max, np.int32)
            some = copies[at : at + COPIES]
            pages[: len(some)] = some
            self._state = replace(self._state, cache=jit_copy_pages(self._state.cache, pages))

    def read_pages(self, pages: Sequence[int]) -> Cache:
        """What these pages hold after all steps dispatched so far, on the host; more pages follow them. Waits."""
        assert self._state is not None
        padded = np.zeros(_power_of_two(len(pages)), np.int32)  # so that few sizes are compiled
        padded[: len(pages)] = pages
        return jax.device_get(gather_pages(self._state.cache, padded))

    def load(self, pages: Sequence[int], snapshot: Snapshot) -> None:
        """Dispatches the writing of a snapshot's first tokens to these pages, after all steps dispatched so far."""
        assert self._state is not None
        padded = np.full(_power_of_two(len(pages)), np.iinfo(np.int32).max, np.int32)
        padded[: len(pages)] = pages
        rows = split(cut(snapshot, min(snapshot.length, len(pages) * self._page_size)), self._page_size, len(padded))
        self._state = replace(self._state, cache=scatter_pages_donated(self._state.cache, padded, rows))

    @cached_property
    def weights(self) -> str:
        """The fingerprint of the weights."""
        return fingerprint.of_params(self._params)

    def check_snapshot(self, snapshot: Snapshot) -> None:
        """SnapshotError unless it is of this cache's shapes and formats, and of these weights as far as it knows."""
        assert self._state is not None
        check_fits(snapshot, self._state.cache)
        if snapshot.weights not in (None, self.weights):
            raise SnapshotError(
                "the snapshot was made with other weights than this engine's: its K and V mean nothing to them "
                "(to try it all the same: dataclasses.replace(snapshot, weights=None))"
            )

    def compile_ahead(self, variant: Variant) -> int:
        """Compiles a variant of every rung, and what copies pages; returns how many rungs there are."""
        self.start_compiling(variant)
        assert self._compiler is not None
        try:
            self._compiler.wait(self._jobs.values())
        finally:
            self._stop_compiling()
        return len(self.sizes.ladder)

    def start_compiling(self, variant: Variant) -> None:
        """The same in the background: returns once all is loaded or traced, and the rung that holds every step is
        there. Until another is, steps take a larger one (see ladder). Raises NoRoomError for a step that takes more
        memory than is left."""
        assert self._state is not None
        self._stop_compiling()
        self._compiler = compiler = Compiler(self.compiled)
        try:
            pages = jax.ShapeDtypeStruct((COPIES, 2), np.int32)
            copies = compiler.add(jit_copy_pages.lower(jax.eval_shape(lambda s: s.cache, self._state), pages))
            keys = [(rung, self._variant_of(rung, variant)) for rung in most_needed_first(self.sizes.ladder)]
            if self._files is not None:
                loads = [partial(self._load, key, self._path(*key)) for key in keys if key not in self._programs]
                compiler.wait(map(compiler.load, loads))  # only then is it known what is to be traced
            for key in keys:
                if key not in self._programs:
                    keep = partial(self._keep, key, self._path(*key))
                    self._jobs[key] = compiler.add(self._lower(*key), keep)
            first = self._jobs.get(keys[0])
            compiler.wait([copies] if first is None else [copies, first])
            top = self._programs[keys[0]] if first is None else first.result()
            check_step(top, self._state, self.sizes, self._memory())
            compiler.leave()
        except BaseException:
            self._stop_compiling()
            raise

    def ladder(self, variant: Variant) -> tuple[Rung, ...]:
        """The rungs that a step of this variant may take now: all but those that are being compiled in the background.
        One that failed to is compiled again when it is needed, and raises there."""
        if not self._jobs:
            return self.sizes.ladder
        self._jobs = {key: job for key, job in self._jobs.items() if not job.done()}
        return tuple(r for r in self.sizes.ladder if (r, self._variant_of(r, variant)) not in self._jobs)

    def _stop_compiling(self) -> None:
        if self._compiler is not None:
            self._compiler.close()
        self._compiler = None
        self._jobs.clear()

    def _variant_of(self, rung: Rung, variant: Variant) -> Variant:
        """What a step of these rows can have of a variant."""
        return variant if rung.tokens else replace(variant, prompt_logprobs=False)

    def _lower(self, rung: Rung, variant: Variant) -> jax.stages.Lowered:
        return jit_step.lower(*self._arguments(rung, variant), **self._static(self.layout(rung, variant), variant))

    def _arguments(self, rung: Rung, variant: Variant) -> tuple[Params, State, jax.ShapeDtypeStruct]:
        """A step's, by shape where nothing but the shape matters."""
        state = jax.eval_shape(lambda s: self._with_penalties(s, variant.penalties), self._state)
        return self._params, state, jax.ShapeDtypeStruct((self.layout(rung, variant).size,), np.int32)

    def _program(self, rung: Rung, variant: Variant) -> jax.stages.Compiled:
        """From memory, from its file, or compiled now, which nobody counts as compiled ahead."""
        key = rung, variant
        if key not in self._programs:
            path = self._path(rung, variant)
            if self._load(key, path) is None:
                self._keep(key, path, self._lower(rung, variant).compile())
        return self._programs[key]

    def _load(self, key: tuple[Rung, Variant], path: Path | None) -> jax.stages.Compiled | None:
        if self._files is None or path is None:
            return None
        found = self._files.load(path)
        if found is not None:
            self._programs[key] = found
            self._loaded.add(path)
        return found

    def _keep(self, key: tuple[Rung, Variant], path: Path | None, made: jax.stages.Compiled) -> None:
        if self._files is None:
            return
        self._programs[key] = made
        if path is not None and not jax_cache_is_on():
            self._files.save(path, made)

    def _path(self, rung: Rung, variant: Variant) -> Path | None:
        """Of a program's file. For the thread that traces."""
        if self._files is None:
            return None
        return self._files.path(self._arguments(rung, variant), self._static(self.layout(rung, variant), variant))

    def _static(self, layout: Layout, variant: Variant) -> dict[str, Any]:
        return {"config": self._config, "layout": layout, "variant": variant, "backend": self._backend}

    def _with_penalties(self, state: State, wanted: bool) -> State:
        """Penalties exist only while an unfinished request asks for them. They start neutral, which is right for the
        sequences that run already, since none of those asked."""
        if wanted == (state.penalties is not None):
            return state
        S, V = self.sizes.limits.max_slots, self._config.vocab_size
        penalties = make_penalties(S, V, SamplingParams.MAX_LOGIT_BIAS) if wanted else None
        return State(state.cache, state.slots, penalties)


def make_files(folder: Path, params: Params) -> Executables:
    """For the device that has the weights. Raises ConfigError for weights on several."""
    device, *others = params.norm.devices()
    if others:
        raise ConfigError(f"executables are for one device, and the weights are on {1 + len(others)}: leave them out")
    if jax_cache_is_on():
        why = "JAX's own compilation cache is on, and XLA cannot serialize what that has had"
        warnings.warn(f"no compiled step is kept in {folder}: {why}", stacklevel=2)
    return Executables(folder, device)


def _power_of_two(n: int) -> int:
    """The least that is not less than n."""
    return 1 << max(0, n - 1).bit_length()
