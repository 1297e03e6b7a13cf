"""Owns the device side of the loop: the state, and the compiled steps that take and return it."""

import time
import warnings
from collections.abc import Callable, Iterator
from collections.abc import Sequence as List
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from itertools import batched, chain
from operator import methodcaller
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.sharding import NamedSharding

from jllm.config import LlamaConfig
from jllm.engine.adapters import Held
from jllm.engine.inputs import with_zeros
from jllm.engine.model_checks import check_model
from jllm.engine.moved import DevicePages, pack_pages, unpack_pages
from jllm.engine.options import EngineOptions, drafter_of
from jllm.engine.placement import Placement, on
from jllm.engine.plan import StepPlan, pack_plan
from jllm.engine.room import check_room, sizes_for
from jllm.engine.sequence import Sequence
from jllm.engine.tapped import Place, rows_of
from jllm.engine.weights import Fit, Weights, check_remade, check_there, copied_bytes, fit_to_round
from jllm.errors import ConfigError, EngineClosed, EngineNotReady, NoRoomError, SnapshotError, WeightsError
from jllm.files import fingerprint
from jllm.files.snapshot import Snapshot, check_fits, check_guided, cut, gather_pages, scatter_pages_donated, split
from jllm.model import adapters
from jllm.model.adapted import OneAdapter, Slots
from jllm.model.backbone import Cache
from jllm.model.cache import distinct, parse_kv_cache, repeated
from jllm.model.hooks import Hooks
from jllm.model.layers import stack_layers
from jllm.model.paged import NOWHERE
from jllm.model.params import Params, matrix_modules
from jllm.parallel.memory import Memory, out_of_memory
from jllm.parallel.mesh import free_of, has_processes, rank_config
from jllm.parallel.ranks import HEADS, REPLICATED, STACKED, place
from jllm.programs.executables import Executables, jax_cache_is_on
from jllm.programs.packed_step import FORWARD, SAMPLE, WHOLE_STEP, Layout
from jllm.programs.programs import Programs
from jllm.programs.step_shapes import StepShapes
from jllm.quant.quantize import weight_formats
from jllm.quant.schemes import Formats, scheme_of
from jllm.speculative.drafter import Drafter
from jllm.speculative.quantized_copy import QuantizedCopy
from jllm.step import between_steps
from jllm.step.between_steps import padded
from jllm.step.buckets import Bucket
from jllm.step.forward import Logits
from jllm.step.state import Outputs, State, Variant, init_state, spread_drafter
from pallas_kernels.formats.quantized_weights import QuantizedWeight

# Options of an engine without adapters
NO_ADAPTERS: dict[str, Any] = dict.fromkeys(("adapters", "max_adapters", "adapter_rank", "adapter_targets"))
IS_DELETED = methodcaller("is_deleted")  # mapped in C: each step asks each array


@dataclass(frozen=True)
class Halfway:
    """Holds a guided step whose first half was dispatched."""

    buffer: np.ndarray
    layout: Layout
    variant: Variant
    logits: Logits
    tapped: int  # rows


@dataclass(frozen=True)
class InFlight:
    """Holds a dispatched step whose outputs have not been read."""

    plan: StepPlan
    bucket: Bucket
    version: int  # of the weights that draw in it
    outputs: Outputs | None  # None: its second half waits for masks
    half: Halfway | None = None  # the inputs of the second half
    tapped: dict[Sequence, Place] = field(default_factory=dict)  # whose values it returns

    def drawn(self, outputs: Outputs) -> Iterator[tuple[Sequence, int, int, tuple[int, ...]]]:
        """Yields what the step drew for each sequence, as ledger.Drawn. `outputs` are on the host."""
        plan, bucket = self.plan, self.bucket
        short = len(outputs.tokens) - bucket.chunks  # rows before those of chunks
        most = short // bucket.decodes if bucket.decodes else 1
        tokens = batched(outputs.tokens[:short].tolist(), most)
        decodes = zip(plan.decodes, plan.rows, range(0, short, most), tokens)
        chunks = ((c.seq, 1, row, (int(outputs.tokens[row]),)) for row, c in enumerate(plan.chunks, short) if c.final)
        return chain(decodes, chunks)


class Device:
    """Owns the state, which every step takes and returns, and the compiled steps.

    `memory` returns how many bytes are free beside the weights; by default it asks the device. `draw` replaces
    sampling.sample. Raises NoRoomError, before anything is allocated, if the options take more than is free.
    """

    def __init__(
        self,
        config: LlamaConfig,
        params: Params,
        options: EngineOptions,
        memory: Memory | None = None,
        draw: Callable[..., Any] | None = None,
    ):
        self._config, self._params = config, params
        self.version, self.asleep = 0, False  # version of the weights
        check_model(params, config, options)
        self.formats = parse_kv_cache(options.kv_cache, config, params.dtype)
        self._page_size = options.page_size
        self._home = None  # the device of the weights, if it is a single one and they are arrays, not shapes
        if config.mesh is None and isinstance(params.norm, jax.Array):
            self._home = next(iter(params.norm.devices()))
        self._chosen = self._home is not None and params.norm.committed  # by the caller, so programs are of that device
        self._memory = memory or partial(free_of, config.mesh, self._home)
        self._options, self._free = options, self._memory()
        drafter = drafter_of(options)
        self._drafter = self._put(drafter, spread_drafter(drafter))
        self._hooks = self._put(options.hooks, REPLICATED)
        self._adapters: dict[str, Slots] | None = None
        self.sizes = sizes_for(options, rank_config(config), params, self._free)
        self._state = self.fresh()
        self._stacked = stack_layers(params, config)  # what steps take, in few arrays
        if options.adapter_places:
            self._targets = adapters.choose_targets(config, options.adapter_targets)
            with jax.default_device(self._home):
                empty = adapters.empty_slots(self._targets, options.adapter_places, options.rank, params.dtype, config)
            self._adapters = self._put(empty, STACKED)
            on = None if config.mesh is None else NamedSharding(config.mesh, STACKED)
            self._write_adapter = jax.jit(adapters.put, donate_argnums=0, out_shardings=on)
            if on is None:
                self._adapter_fit = Fit.to(adapters.taken(self._adapters, np.int32(0)))
        self.shapes = StepShapes(
            config,
            self.sizes,
            self._stacked,
            jax.eval_shape(lambda state: state, self._state),
            self._drafter,
            self._hooks,
            options.kernels,
            draw,
            always_drafts=options.drafts is not None,
            home=self._home,
            chosen=self._chosen,
            adapters=jax.eval_shape(lambda adapters: adapters, self._adapters),
        )
        files = None if options.executables is None else make_files(Path(options.executables), params, config)
        self.programs = Programs(self.shapes, files, options.progress, options.compile_processes)
        self._to_round: dict[str, tuple[Fit, dict[str, Formats]]] = {}  # by scheme, what weights it can round
        concrete = self._home is not None or config.mesh is not None
        trees = params, self._drafter, self._hooks
        self._fit, self._drafter_fit, self._hooks_fit = (Fit.to(x) if concrete else None for x in trees)
        self._unmade: str | None = None  # why the weights of the newest update could not be made
        self._hold((self._params, self._drafter, self._hooks))

    def _hold(self, tree: tuple[Params, Drafter | None, Hooks | None]) -> None:
        """Takes note of the arrays that steps take and that others may donate."""
        self._holds, self._held = tree, [leaf for leaf in jax.tree.leaves(tree) if isinstance(leaf, jax.Array)]

    def fit(
        self,
        params: Params | None,
        copy: bool,
        scheme: str | None,
        drafter: Drafter | None,
        hooks: Hooks | None,
        replaces: bool = False,
    ) -> Weights:
        """Returns new weights as programs take them, or checked ones that are to replace the engine's in their memory.
        Raises WeightsError for weights that programs cannot take."""
        begin = time.perf_counter()
        weights = self._fitted(params, copy, scheme, drafter, hooks, replaces)
        given = (self._params if params is None else params, drafter, hooks)
        copied = copied_bytes(given, (weights.params, weights.drafter, weights.hooks))
        return replace(weights, copied=copied, seconds=time.perf_counter() - begin)

    def _fitted(
        self,
        params: Params | None,
        copy: bool,
        scheme: str | None,
        drafter: Drafter | None,
        hooks: Hooks | None,
        replaces: bool,
    ) -> Weights:
        assert self._fit is not None
        assert self._drafter_fit is not None
        assert self._hooks_fit is not None
        if hooks is not None:
            if jax.tree.structure(hooks) != self._hooks_fit.tree:
                raise WeightsError("hooks must have the engine's functions, and other arrays of the same shapes")
            hooks = self._hooks_fit.take(hooks, copy)
        if params is None:
            if scheme is not None or (drafter is None and hooks is None):
                raise WeightsError("an update takes params, a drafter or hooks, and quantize rounds params: give them")
            if self._unmade is not None:  # older ones would take their place
                raise WeightsError(f"the weights of the newest update could not be made: {self._unmade}; give params")
            params = self._params
        if drafter is not None:
            if self._drafter is None:
                raise WeightsError("drafter is given, and the engine has none: leave it out")
            drafter = self._drafter_fit.take(drafter, copy)
        elif isinstance(self._drafter, QuantizedCopy):
            check_remade(self._drafter, self._config)
        if replaces:
            self._fit.check(params)
            return Weights(params, drafter, hooks, replaces=True)
        if scheme is None:
            return Weights(self._fit.take(params, copy and params is not self._params), drafter, hooks)
        if scheme not in self._to_round:
            self._to_round[scheme] = fit_to_round(self._fit, params, scheme, self._config)
        fit, formats = self._to_round[scheme]
        return Weights(fit.take(params, copy), drafter, hooks, formats)

    def fit_adapter(self, name: str, adapter: Any) -> dict[str, OneAdapter]:
        """Returns an adapter as put_adapter takes it. Raises WeightsError for one that does not fit."""
        what, rank = f"adapter {name!r}", self._options.rank
        adapters.check_adapter(adapter, self._targets, rank, what)
        for path, leaf in jax.tree_util.tree_flatten_with_path(adapter)[0]:
            check_there(f"{what}: {jax.tree_util.keystr(path)}", leaf)
        return adapters.arrays_of(adapter, self._targets, rank, self._params.dtype)

    def put_adapter(self, place: int, adapter: dict[str, OneAdapter]) -> None:
        """Writes an adapter to its place, for the steps that are dispatched from now on."""
        assert self._adapters is not None
        if self._config.mesh is None:
            adapter = self._adapter_fit.take(adapter)
        else:
            adapter = adapters.share_adapter(adapter, self._targets, self._config)
        self._adapters = self._write_adapter(self._adapters, adapter, np.int32(place))

    @property
    def reads_adapters(self) -> bool:
        """Returns whether read_adapter works. The devices of a mesh have parts of an adapter."""
        return self._config.mesh is None

    def read_adapter(self, place: int) -> dict[str, OneAdapter]:
        """Returns the adapter at a place, on the host."""
        assert self._adapters is not None
        return jax.device_get(adapters.taken(self._adapters, np.int32(place)))

    def rebind(self, weights: Weights, version: int) -> None:
        """Takes other weights, for the steps that are dispatched from now on. Where these are gone, or could not be
        made, check_ready() raises until others come."""
        self.version, self._unmade = version, None
        self.__dict__.pop("weights", None)
        if weights.gone:  # rounding them would fail
            self._hold((weights.params, weights.drafter, weights.hooks))
            return
        try:
            assert self._fit is not None
            self._params, self._drafter = weights.after(self._params, self._drafter, self._fit)
            self._stacked = stack_layers(self._params, self._config)
        except jax.errors.JaxRuntimeError as error:
            self._unmade = str(error).partition("\n")[0]
            return
        self._hooks = self._hooks if weights.hooks is None else weights.hooks
        self.shapes = replace(self.shapes, params=self._stacked, drafter=self._drafter, hooks=self._hooks)
        self.programs.describe(self.shapes)
        self._hold((self._params, self._drafter, self._hooks))

    def lacks_room(self, size: int) -> bool:
        """Returns whether `size` bytes of other weights have no place beside the engine's. While it sleeps they have
        none, since its pages need one piece of memory."""
        free = self._memory()
        return self.asleep or (free is not None and free < size)

    def check_ready(self) -> None:
        """Raises EngineNotReady if the device sleeps, or lacks its weights."""
        if self.asleep:
            raise EngineNotReady("the engine sleeps: call wake() first")
        self.check_weights()

    def check_weights(self) -> None:
        """Raises EngineNotReady if an array that steps take was donated or deleted, or could not be made."""
        if self._unmade is not None:
            raise EngineNotReady(f"the weights of the newest update could not be made: {self._unmade}; update() again")
        if self.lacks_weights:
            held = jax.tree_util.tree_flatten_with_path(self._holds)[0]
            path = next(path for path, leaf in held if leaf.is_deleted())
            name = jax.tree_util.keystr(path[1:]).lstrip(".")
            raise EngineNotReady(
                f"{name} was donated or deleted while the engine held it: update() with weights that exist before the "
                "next step, and with copy=True where you donate meanwhile"
            )

    @property
    def lacks_weights(self) -> bool:
        """Returns whether an array that steps take was donated or deleted."""
        return self._unmade is not None or any(map(IS_DELETED, self._held))

    def token_logprobs_options(self) -> dict[str, Any]:
        """Returns the options of jllm.token_logprobs, as Engine.token_logprobs_options does."""
        formats = weight_formats(self._params)
        leaves = jax.tree.leaves(self._params, is_leaf=lambda leaf: isinstance(leaf, QuantizedWeight))
        if self._hooks is not None and (self._hooks.edit or self._hooks.add):
            raise ConfigError("hooks edit values of this engine, and jllm.token_logprobs edits none")
        if not all(w.origin.nearest for w in leaves if isinstance(w, QuantizedWeight)):
            raise ConfigError(
                "these weights' codes come from a file or a calibration, and jllm.token_logprobs rounds to nearest: "
                "quantize 16-bit weights, by load(quantize=), jllm.quant.quantize or update(quantize=)"
            )
        places = {"adapter_rank": self._options.rank, "adapter_targets": self._options.adapter_targets}
        return {
            "page_size": self._page_size,
            "dtype": self._params.dtype,
            "quantize": scheme_of(formats, matrix_modules(self._params)) if formats else None,
            "kv_cache": self.formats,
            "deterministic": self._options.deterministic,
        } | ({} if self._adapters is None else places)

    def renew(self) -> None:
        """Makes a fresh state: an empty page pool and empty slots. The old pool is dropped first, since there is room
        for only one. Kept programs and their files are dropped too, since a loaded program may have failed. Raises
        EngineClosed if several processes share the model."""
        if self._state is not None and has_processes(self._config):
            raise EngineClosed(
                "a device of this model, or a process that has one, has failed: start all processes anew"
            )
        self._state = None
        self.programs.forget_files()
        self._state = self.fresh()

    def fresh(self) -> State | None:
        """Returns the state of an engine that has served nothing, or None on a device that runs no steps."""
        check_room(self._options, rank_config(self._config), self._params, self._free)
        self._free = None  # a later state takes the same room, which the device may not report as free yet
        limits = self.sizes.limits
        with jax.default_device(self._home):
            state = init_state(
                self._config,
                slots=limits.max_slots,
                num_pages=limits.num_pages,
                page_size=limits.page_size,
                max_pages=self.sizes.max_pages,
                kv_cache=self.formats,
                dtype=self._params.dtype,
                drafter=self._drafter,
                adapters=self._options.adapter_places > 0,
            )
            if self._hooks is not None:
                own = self._hooks.start(limits.max_slots), self._hooks.no_inputs(limits.max_slots)
                user, inputs = place(own, self._config, REPLICATED)
                state = replace(state, user=user, inputs=inputs)
        return state

    def free(self) -> None:
        """Frees the memory of the state. No step can run until renew()."""
        self._state = None

    def sleep(self) -> None:
        """Gives the memory of the state back until wake()."""
        self.free()
        self.asleep = True

    def wake(self) -> None:
        """Makes a fresh state. Raises NoRoomError, and goes on sleeping, where there is no room for one."""
        options = replace(self._options, num_pages=self.sizes.limits.num_pages, **NO_ADAPTERS)  # these stay
        check_room(options, rank_config(self._config), self._params, self._memory())
        try:
            self._state = self.fresh()
        except jax.errors.JaxRuntimeError as error:
            if not out_of_memory(error):
                raise
            raise NoRoomError(f"there is no room to wake: {str(error).partition(chr(10))[0]}") from None
        self.asleep = False

    def close(self) -> None:
        """Drops everything that holds device memory, and waits for threads that compile."""
        self.programs.close()
        del self._params, self._stacked, self.shapes, self._held, self._holds, self._drafter, self._hooks
        del self._adapters
        self._state = None

    def dispatch(self, plan: StepPlan, need: Variant) -> InFlight:
        """Dispatches the plan's loads and copies, then its step, without waiting for any of them. Of a guided step it
        dispatches only the first half; complete() dispatches the second."""
        bucket, variant = self.programs.choose(need, *plan.size, plan.most_rows)
        layout = self.shapes.layout(bucket, variant)
        rows, tapped = rows_of(plan, bucket) if variant.taps else ([], {})
        buffer = pack_plan(layout, plan, self._page_size, rows)
        for seq in plan.loads:
            assert seq.snapshot is not None
            self.load(seq.pages[: -(-seq.snapshot.length // self._page_size)], seq.snapshot)
        if plan.copies:
            self.copy_pages(plan.copies)
        self._put_inputs([seq for seq, _ in plan.begun])
        remembers = self._drafter is not None or (self._hooks is not None and self._hooks.observe is not None)
        for seq, skipped in plan.begun if remembers else ():
            if self._state is not None and seq.slot is not None and skipped:
                known = seq.slot, seq.slice(0, skipped)
                self._state = between_steps.remember(self._state, self._drafter, self._hooks, *known)
        if variant.guided:
            logits = self._run(FORWARD, buffer, layout, variant, None, self._hooks)
            half = Halfway(buffer, layout, variant, logits, len(rows))
            return InFlight(plan, bucket, self.version, None, half, tapped)
        outputs = _fetch_taps(self.run(buffer, layout, variant), len(rows))
        return InFlight(plan, bucket, self.version, outputs, tapped=tapped)

    def _put_inputs(self, begun: List[Sequence]) -> None:
        """Puts the inputs of sequences that begin into their slots, if the hooks take any."""
        shapes = None if self._hooks is None else self._hooks.inputs
        if shapes is None or self._state is None:
            return
        given = [with_zeros(seq.inputs, shapes) for seq in begun]
        slots = [seq.slot for seq in begun if seq.slot is not None]
        self._state = between_steps.put_inputs(self._state, slots, given)

    def complete(self, step: InFlight) -> InFlight:
        """Dispatches the second half of a guided step."""
        half = step.half
        assert half is not None
        more = self.shapes.drafter_in(step.bucket), self._hooks, half.logits
        outputs = _fetch_taps(self._run(SAMPLE, half.buffer, half.layout, half.variant, *more), half.tapped)
        return InFlight(step.plan, step.bucket, step.version, outputs, tapped=step.tapped)

    def run(self, buffer: np.ndarray, layout: Layout, variant: Variant) -> Outputs:
        """Dispatches one step without waiting for it, and begins to copy its outputs to the host, but for tapped
        values."""
        return self._run(WHOLE_STEP, buffer, layout, variant, self.shapes.drafter_in(layout.bucket), self._hooks)

    def wants_drafts(self, step: InFlight) -> bool:
        """Returns whether the step after a guided one may verify drafts."""
        return self._drafter is not None and step.half is not None and step.half.layout.wanted

    def guide(self, slots: List[int], allowed: np.ndarray, coming: np.ndarray) -> None:
        """Puts into the state which tokens these guided slots may draw, and which they probably draw. Call it before
        the second half of their step. Shapes are u32[n, nodes, ceil(V / 32)] and i32[n, F], as in Guidance."""
        assert self._state is not None
        self._state = between_steps.guide(self._state, slots, allowed, coming)

    def _run(self, part: str, buffer: np.ndarray, layout: Layout, variant: Variant, *more: Any) -> Any:
        assert self._state is not None
        self._state = self.shapes.as_asked(self._state, variant)
        key = layout.bucket, variant, part
        params = replace(self._stacked, adapters=self._adapters) if variant.adapters else self._stacked
        self._state, found = self.programs.run(key, params, self._state, buffer, *more)
        if part != FORWARD:
            for leaf in jax.tree.leaves(replace(found, taps={})):
                leaf.copy_to_host_async()
        return found

    def copy_pages(self, copies: List[tuple[int, int]]) -> None:
        """Dispatches copies of pages (from, to) after all steps so far. No page is both a source and a target."""
        assert self._state is not None
        self._state = between_steps.copy_pages(self._state, copies)

    def read_pages(self, pages: List[int]) -> Cache:
        """Waits for all steps dispatched so far. Then returns what these pages hold, on the host. Filler pages follow
        them."""
        assert self._state is not None
        return distinct(jax.device_get(gather_pages(self._state.cache, padded(pages, 0))), self._config)

    def pack(self, pages: List[int], length: int, to: Placement) -> DevicePages:
        """Sends K and V of `length` tokens in these pages to another engine, after all steps dispatched so far."""
        assert self._state is not None
        arrays = pack_pages(self._state.cache, padded(pages, 0))
        return DevicePages(length, jax.device_put(arrays, on(to, HEADS)))

    def warm_up(self, tokens: int, to: Placement | None) -> None:
        """Compiles the functions that move up to `tokens` tokens to an engine at `to`, or from one (None)."""
        assert self._state is not None
        # Places the cache as steps will return it: jit tells placed arrays from those on a device by default.
        self._state = replace(self._state, cache=jax.device_put(self._state.cache, self._home))
        count, most = 1, -(-tokens // self._page_size)
        while True:
            if to is not None:
                jax.block_until_ready(self.pack([0] * count, 0, to).arrays)
            else:
                arrays = pack_pages(self._state.cache, padded([0] * count, 0))
                self.load([NOWHERE] * count, DevicePages(0, arrays))
            if count >= most:
                return
            count *= 2

    def load(self, pages: List[int], snapshot: Snapshot | DevicePages) -> None:
        """Writes a snapshot's first tokens to these pages after all steps dispatched so far, without waiting."""
        assert self._state is not None
        to = padded(pages, NOWHERE)
        if isinstance(snapshot, DevicePages):
            self._state = replace(self._state, cache=unpack_pages(self._state.cache, to, snapshot.arrays))
            return
        rows = split(cut(snapshot, min(snapshot.length, len(pages) * self._page_size)), self._page_size, len(to))
        rows = repeated(rows, self._config)
        self._state = replace(self._state, cache=scatter_pages_donated(self._state.cache, to, rows))

    @property
    def fingerprint(self) -> str:
        """Returns the fingerprint of all that K and V depend on besides tokens and their formats."""
        return fingerprint.of_model(self._params, self._config)

    @cached_property
    def weights(self) -> str:
        """Returns the fingerprint of the weights, of what is computed with them, and of the hooks' arrays."""
        found = fingerprint.of_function(self._params, self._config)
        acting = None if self._hooks is None else (self._hooks.edit, self._hooks.add)
        return f"{found} {fingerprint.of_params(acting)}" if jax.tree.leaves(acting) else found

    def weights_with(self, adapter: Held | None) -> str:
        """Returns the fingerprint of the weights together with an adapter."""
        if adapter is None:
            return self.weights
        value = adapter.value
        if value is None:
            assert adapter.place is not None, "it is on the host, on the device or on both"
            value = self.read_adapter(adapter.place)
        return f"{self.weights}+{fingerprint.of_params(value)}"

    def check_snapshot(self, snapshot: Snapshot, adapter: Held | None) -> None:
        """Raises SnapshotError for other shapes, formats or weights than the engine's, as far as the snapshot has them.
        The request's adapter is a part of the weights. Raises it too if its guide does not begin within it."""
        assert self.shapes.state is not None
        self.check_weights()
        check_guided(snapshot)
        check_fits(snapshot, jax.eval_shape(partial(distinct, config=self._config), self.shapes.state.cache))
        own = "" if adapter is None else f" with adapter {adapter.name!r}"
        if snapshot.weights not in (None, self.weights_with(adapter)):
            raise SnapshotError(
                f"the snapshot was made with other weights, or another config, than this engine's{own}: "
                "its K and V mean nothing here (to try it all the same: dataclasses.replace(snapshot, weights=None))"
            )

    def compile_ahead(self, variants: List[Variant], wait: bool) -> int:
        """Compiles the steps of all buckets of some variants, of which the first covers the others, and the functions
        between them. Returns the number of buckets; without `wait`, as soon as the first variant's bucket that holds
        every step is compiled. Raises NoRoomError for a step that takes more memory than is free."""
        compiles = self.programs.compile_ahead if wait else self.programs.start
        compiles(variants, self._memory())
        return len(self.sizes.buckets)

    def _put(self, tree: Any, spec: Any) -> Any:
        """Returns the tree of arrays, placed as steps need it. `spec` is a layout as `place` has it."""
        return jax.device_put(tree, self._home) if self._chosen else place(tree, self._config, spec)


def _fetch_taps(outputs: Outputs, rows: int) -> Outputs:
    """Returns the outputs of a step with the first rows of tapped values alone, and begins to copy these to the
    host."""
    if not outputs.taps:
        return outputs
    few = 1 << max(0, rows - 1).bit_length()  # few sizes are compiled
    taps = between_steps.first_rows(outputs.taps, few)
    for value in taps.values():
        value.copy_to_host_async()
    return replace(outputs, taps=taps)


def make_files(folder: Path, params: Params, config: LlamaConfig) -> Executables:
    """Returns the files of compiled steps for the device that has the weights, or for the config's mesh."""
    devices = tuple(params.norm.devices() if config.mesh is None else config.mesh.devices.flat)
    if jax_cache_is_on():
        why = "JAX's own compilation cache is on, and XLA cannot serialize what that has had"
        warnings.warn(f"no compiled step is kept in {folder}: {why}", stacklevel=2)
    return Executables(folder, devices)
