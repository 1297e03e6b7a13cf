"""The device side of the loop: the state, and the compiled steps that it goes through."""

import warnings
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from itertools import product
from pathlib import Path
from typing import Any

import jax
import numpy as np

from jllm import fingerprint
from jllm.batch import NOWHERE, Bucket
from jllm.cache import COPIES, jit_copy_pages, parse_kv_cache
from jllm.config import LlamaConfig
from jllm.engine import between_steps
from jllm.engine.between_steps import MASKS, padded, put_masks
from jllm.engine.compiling import Recipe
from jllm.engine.executables import Executables, jax_cache_is_on
from jllm.engine.layout import FORWARD, SAMPLE, WHOLE, Layout, packed_step
from jllm.engine.model_checks import check_model
from jllm.engine.options import EngineOptions, drafter_of
from jllm.engine.programs import Programs
from jllm.engine.request import SamplingParams
from jllm.engine.room import check_room, check_step, sizes_for
from jllm.errors import EngineClosed, SnapshotError
from jllm.memory import Memory
from jllm.model import Cache
from jllm.parallel.kv_heads import distinct, repeated
from jllm.parallel.mesh import free_of, has_processes, rank_config
from jllm.parallel.ranks import HEADS, place, placed_shapes
from jllm.parallel.ranks import WHOLE as EVERYWHERE
from jllm.params import Params
from jllm.snapshot import Snapshot, check_fits, check_guided, cut, gather_pages, scatter_pages_donated, split
from jllm.speculative.drafter import Drafter
from jllm.speculative.tree import Tree, chain
from jllm.state import SPREAD, Outputs, State, Variant, init_state, spread_drafter
from jllm.step_forward import Logits


@dataclass(frozen=True)
class Halfway:
    """A guided step of which the first half was dispatched."""

    buffer: np.ndarray
    layout: Layout
    variant: Variant
    logits: Logits


class Device:
    """Owns the state, which every step takes and returns, and the compiled steps.

    memory tells how many bytes are free once the weights are there; the device is asked by default. Raises NoRoomError,
    before anything is allocated, where the options take more.
    """

    def __init__(self, config: LlamaConfig, params: Params, options: EngineOptions, memory: Memory | None = None):
        self._config, self._params, self._backend = config, params, options.kernels
        check_model(params, config, options)
        self._formats = parse_kv_cache(options.kv_cache, config, params.dtype)
        self._page_size = options.page_size
        self._home = None  # the device that has the weights, where it is one, and these are no shapes alone
        if config.mesh is None and isinstance(params.norm, jax.Array):
            self._home = next(iter(params.norm.devices()))
        self._chosen = self._home is not None and params.norm.committed  # not by JAX: programs are then of that device
        self._memory = memory or partial(free_of, config.mesh, self._home)
        self._options, self._free = options, self._memory()
        drafter = drafter_of(options)
        self._drafter = self._put(drafter, spread_drafter(drafter))
        self._hooks = self._put(options.hooks, EVERYWHERE)
        self.sizes = sizes_for(options, rank_config(config), params, self._free)
        self._left: int | None = None  # bytes free beside the state, before steps ran; None where that is unknown
        files = None if options.executables is None else make_files(Path(options.executables), params, config)
        self.programs = Programs(
            self.sizes.buckets, self._arguments, self._static, files, self._check, options.progress, self._masks,
            options.compile_processes, has_processes(config), self._chosen,
        )  # fmt: skip
        self._state: State | None = None
        self.renew()

    def renew(self) -> None:
        """A fresh state: an empty page pool and empty slots. The old pool goes first, as there is room for one only. So
        do programs and their files: one that was loaded may be what failed. EngineClosed where other processes have a
        part of it."""
        if self._state is not None and has_processes(self._config):
            raise EngineClosed(
                "a device of this model, or a process that has one, has failed: start all processes anew"
            )
        self._state = None
        self.programs.forget_files()
        check_room(self._options, rank_config(self._config), self._params, self._free)
        self._free = None  # later on there is as much as there was, but the device may not know it yet
        with jax.default_device(self._home):
            self._state = self._fresh()

    def _fresh(self) -> State:
        limits = self.sizes.limits
        state = init_state(
            self._config,
            slots=limits.max_slots,
            num_pages=limits.num_pages,
            page_size=limits.page_size,
            max_pages=self.sizes.max_pages,
            kv_cache=self._formats,
            dtype=self._params.dtype,
            drafter=self._drafter,
        )
        if self._hooks is not None:
            state = replace(state, user=place(self._hooks.start(limits.max_slots), self._config, EVERYWHERE))
        return state

    def free(self) -> None:
        """Gives the memory of the state back. There are no steps until renew()."""
        self._state = None

    def close(self) -> None:
        """Drops everything that holds device memory, and waits for threads that compile."""
        self.programs.close()
        del self._params
        self._state = None

    def layout(self, bucket: Bucket, variant: Variant) -> Layout:
        """A step's. Drafts are wanted of steps that verify some, and of those that begin sequences, if few decode."""
        limits = self.sizes.limits
        wanted = bucket.rows > 1 or (bucket.tokens > 0 and bucket.decodes <= limits.most_short)
        bias = SamplingParams.MAX_LOGIT_BIAS if variant.penalties else 0
        return Layout(bucket, limits.max_deltas, bias, wanted)

    def run(self, buffer: np.ndarray, layout: Layout, variant: Variant) -> Outputs:
        """Dispatches one step without waiting for it; a copy of the outputs to the host is under way."""
        return self._run(WHOLE, buffer, layout, variant, self._drafter_in(layout.bucket), self._hooks)

    def forward(self, buffer: np.ndarray, layout: Layout, variant: Variant) -> Halfway:
        """Dispatches the first half of a guided step."""
        return Halfway(buffer, layout, variant, self._run(FORWARD, buffer, layout, variant, None, self._hooks))

    def tree(self, bucket: Bucket | None = None) -> Tree:
        """The shape of each sequence's drafts in a step of this size; by default of the largest."""
        if self._drafter is None or (bucket is not None and bucket.rows == 1):
            return chain(0)
        return self._drafter.tree

    def guide(self, slots: Sequence[int], allowed: np.ndarray, coming: np.ndarray) -> None:
        """Before the second half of a step: what its guided slots may draw at the nodes that it has, and what probably
        comes, as Guidance has them: u32[n, nodes, ceil(V / 32)] and i32[n, F]."""
        assert self._state is not None
        self._state = between_steps.guide(self._state, slots, allowed, coming)

    def sample(self, half: Halfway) -> Outputs:
        """Dispatches the second half of a guided step."""
        layout = half.layout
        more = self._drafter_in(layout.bucket), self._hooks, half.logits
        return self._run(SAMPLE, half.buffer, layout, half.variant, *more)

    def _run(self, part: str, buffer: np.ndarray, layout: Layout, variant: Variant, *more: Any) -> Any:
        assert self._state is not None
        self._state = self._as_asked(self._state, variant)
        key = layout.bucket, variant, part
        self._state, found = self.programs.run(key, self._params, self._state, buffer, *more)
        if part != FORWARD:
            for leaf in jax.tree.leaves(found):
                leaf.copy_to_host_async()
        return found

    def copy_pages(self, copies: Sequence[tuple[int, int]]) -> None:
        """Dispatches copies of pages (from, to), none of them both; they come after all steps dispatched so far."""
        assert self._state is not None
        self._state = between_steps.copy_pages(self._state, copies)

    @property
    def remembers(self) -> bool:
        """Whether a drafter or hooks want to know the tokens that no step computes."""
        return self._drafter is not None or (self._hooks is not None and self._hooks.observe is not None)

    def remember(self, slot: int, tokens: Sequence[int]) -> None:
        """Tells the drafter and hooks the first tokens of a slot's sequence, which no step computes."""
        if self._state is not None:
            self._state = between_steps.remember(self._state, self._drafter, self._hooks, slot, tokens)

    def read_pages(self, pages: Sequence[int]) -> Cache:
        """What these pages hold after all steps dispatched so far, on the host; more pages follow them. Waits."""
        assert self._state is not None
        return distinct(jax.device_get(gather_pages(self._state.cache, padded(pages, 0))), self._config)

    def load(self, pages: Sequence[int], snapshot: Snapshot) -> None:
        """Dispatches the writing of a snapshot's first tokens to these pages, after all steps dispatched so far."""
        assert self._state is not None
        to = padded(pages, NOWHERE)
        rows = split(cut(snapshot, min(snapshot.length, len(pages) * self._page_size)), self._page_size, len(to))
        rows = repeated(rows, self._config)
        self._state = replace(self._state, cache=scatter_pages_donated(self._state.cache, to, rows))

    @cached_property
    def weights(self) -> str:
        """The fingerprint of the weights, and of what is computed with them."""
        return fingerprint.of_function(self._params, self._config)

    def check_snapshot(self, snapshot: Snapshot) -> None:
        """SnapshotError unless it is of this cache's shapes and formats, and of these weights as far as it knows, and
        its guide begins within it."""
        assert self._state is not None
        check_guided(snapshot)
        check_fits(snapshot, jax.eval_shape(partial(distinct, config=self._config), self._state.cache))
        if snapshot.weights not in (None, self.weights):
            raise SnapshotError(
                "the snapshot was made with other weights, or another config, than this engine's: "
                "its K and V mean nothing here (to try it all the same: dataclasses.replace(snapshot, weights=None))"
            )

    def compile_ahead(self, variant: Variant) -> int:
        """Compiles a variant of every bucket, and what copies pages; returns how many buckets there are. Raises
        NoRoomError for a step that takes more memory than is left."""
        self._left = self._memory()
        self.programs.compile_ahead(variant, self._copying())
        return len(self.sizes.buckets)

    def start_compiling(self, variant: Variant) -> None:
        """The same in the background: returns once the bucket that holds every step is there."""
        self._left = self._memory()
        self.programs.start(variant, self._copying())

    def _copying(self) -> Recipe:
        assert self._state is not None
        pages = jax.ShapeDtypeStruct((COPIES, 2), np.int32)
        pools, own = jax.eval_shape(between_steps.pools, self._state), len(self._state.cache)
        pools = self._placed(pools, (HEADS,) * own + (EVERYWHERE,) * (len(pools) - own))
        return Recipe(partial(jit_copy_pages.lower, pools, pages), name="copies of pages")

    def _masks(self, variant: Variant) -> list[Recipe]:
        """What puts masks into the state between the halves of a variant's steps."""
        guidance = jax.eval_shape(lambda s: self._as_asked(s, variant), self._state).guidance
        if guidance is None:
            return []
        guidance, found = self._placed(guidance, EVERYWHERE), []
        for size, nodes in product(MASKS, {1, self.tree().size}):
            where, *new = (
                jax.ShapeDtypeStruct((size, *shape), dtype)
                for shape, dtype in (
                    ((), np.int32),
                    ((nodes, guidance.allowed.shape[2]), np.uint32),
                    (guidance.coming.shape[1:], np.int32),
                )
            )
            found.append(Recipe(partial(put_masks.lower, guidance, where, *new), name=f"{size} masks"))
        return found

    def _check(self, top: jax.stages.Compiled) -> None:
        assert self._state is not None
        check_step(top, self._state, self.sizes, self._left)

    def _arguments(self, bucket: Bucket, variant: Variant, part: str) -> tuple[Any, ...]:
        """A program's, by shape where nothing but the shape matters."""
        state = jax.eval_shape(lambda s: self._as_asked(s, variant), self._state)
        state = self._placed(state, SPREAD)
        buffer = jax.ShapeDtypeStruct((self.layout(bucket, variant).size,), np.int32)
        first = self._params, state, buffer
        if part == FORWARD:
            return *first, None, self._hooks
        if part == WHOLE:
            return *first, self._drafter_in(bucket), self._hooks
        _, logits = packed_step.eval_shape(*first, None, self._hooks, **self._static(bucket, variant, FORWARD))
        return *first, self._drafter_in(bucket), self._hooks, self._placed(logits, EVERYWHERE)

    def _put(self, tree: Any, spec: Any) -> Any:
        """Arrays that may be elsewhere, where steps want them; spec: as place has it."""
        return jax.device_put(tree, self._home) if self._chosen else place(tree, self._config, spec)

    def _placed(self, shapes: Any, spec: Any) -> Any:
        """Shapes of arrays where steps want them; spec: as placed_shapes has it."""
        if not self._chosen:
            return placed_shapes(shapes, self._config, spec)
        on = jax.sharding.SingleDeviceSharding(self._home)
        return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=on), shapes)

    def _drafter_in(self, bucket: Bucket) -> Drafter | None:
        """The drafter, as far as it sees a step. With the automatic choice, plain steps compute no K and V for one that
        has some: it would cost time even where drafts never pay. What it lacks then costs acceptance alone."""
        drafts = None if self._state is None else self._state.drafts
        rests = self._options.drafts is None and drafts is not None and bool(drafts.cache)
        return None if rests and bucket.rows == 1 and not bucket.tokens else self._drafter

    def _static(self, bucket: Bucket, variant: Variant, part: str) -> dict[str, Any]:
        layout = self.layout(bucket, variant)
        static = {"config": self._config, "layout": layout, "variant": variant, "backend": self._backend}
        return static if part == WHOLE else static | {"part": part}

    def _as_asked(self, state: State, variant: Variant) -> State:
        return between_steps.as_asked(state, variant, self._config, self.tree(), self._home)


def make_files(folder: Path, params: Params, config: LlamaConfig) -> Executables:
    """For the device that has the weights, or the config's mesh."""
    devices = tuple(params.norm.devices() if config.mesh is None else config.mesh.devices.flat)
    if jax_cache_is_on():
        why = "JAX's own compilation cache is on, and XLA cannot serialize what that has had"
        warnings.warn(f"no compiled step is kept in {folder}: {why}", stacklevel=2)
    return Executables(folder, devices)
