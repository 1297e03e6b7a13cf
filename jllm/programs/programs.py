"""Manages the compiled steps of one engine: chooses one for each step, and compiles missing ones.

A step needs a variant and a bucket. It is one program, or two for the guided variant: its halves. It may take a program
of a wider variant and a larger bucket instead, which only costs time. So missing programs can be compiled in the
background while steps take existing ones.
"""

from collections.abc import Sequence
from concurrent.futures import FIRST_COMPLETED, CancelledError, Future
from concurrent.futures import wait as wait_for
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import jax

from jllm.parallel.mesh import has_processes
from jllm.programs.compiler import Compiled, Compiler, Recipe, most_needed_first
from jllm.programs.executables import Executables, jax_cache_is_on
from jllm.programs.packed_step import FORWARD, SAMPLE, WHOLE_STEP, jitted
from jllm.programs.step_room import check_step
from jllm.programs.step_shapes import StepShapes
from jllm.programs.tracing import usual_processes
from jllm.step.buckets import Bucket, choose_bucket
from jllm.step.state import Variant

Step = tuple[Bucket, Variant]
Key = tuple[Bucket, Variant, str]  # the string is the part of the step that the program computes


class Programs:
    """Holds the compiled steps of one engine.

    Programs live in packed_step's own cache, which engines of the same shapes share. With files, or with `processes`
    that trace, they live here (and in the files). `processes` None is as many as usual.

    in_step: each step waits for exactly the program that it asks for, so that several processes run the same one.
    """

    def __init__(
        self,
        shapes: StepShapes,
        files: Executables | None = None,
        progress: bool | None = None,
        processes: int | None = None,
    ):
        self.in_step = has_processes(shapes.config)
        self.compiled = Compiled()
        self.used: set[Key] = set()  # programs that steps took
        self.ahead = False  # whether all sizes of a variant are compiled ahead, or will be soon
        self._buckets = most_needed_first(shapes.sizes.buckets)
        self._shapes, self._files = shapes, files
        self._progress, self._tells = progress, processes is not None
        self._processes = _usual_processes(shapes, files is not None) if processes is None else processes
        # packed_step's cache lacks programs traced elsewhere, and programs compiled ahead for a chosen device.
        self._keeps = shapes.chosen or files is not None or self._processes > 0
        self._free: int | None = None  # bytes beside weights and state; None where that is unknown
        self._open: set[Variant] = set()  # variants whose steps can run at once, whatever their size
        self._made: set[Key] = set()
        self._permitted: set[Key] = set()  # programs that a step may wait for
        self._jobs: dict[Key, Future] = {}
        self._beside: list[tuple[Variant, Future]] = []  # compilations of functions that run between steps
        self._failed: dict[Variant, BaseException] = {}
        self._kept: dict[Key, jax.stages.Compiled] = {}  # made programs that packed_step's cache lacks
        self._loaded: set[Path] = set()
        self._compiler: Compiler | None = None

    # Choosing the program of a step

    def serves(self, variant: Variant) -> bool:
        """Returns whether steps of this variant, or of one that covers it, can run at once."""
        self._collect()
        return self._narrowest(variant) is not None

    def permit(self, variant: Variant) -> None:
        """Lets steps of this variant wait for missing programs from now on."""
        self._open.add(variant)
        self._permitted.update(self._keys(variant))

    def choose(self, need: Variant, decodes: int, tokens: int, chunks: int, rows: int = 1) -> Step:
        """Returns the bucket and variant that a step takes: the smallest bucket of the narrowest variant.

        If its program is missing, it is compiled in the background. The step then takes a larger bucket, or one of
        fewer rows a decode. With `in_step` the step always takes the smallest bucket.
        """
        self._collect()
        variant = self._narrowest(need)
        if variant is None:
            self.permit(need)
            variant = need
        bucket = choose_bucket(self._buckets, decodes, tokens, chunks, rows)
        if not self.in_step and not self._is_there(bucket, variant):
            self._begin(bucket, variant)
            now = [bucket for bucket in self._buckets if self._is_there(bucket, variant)]
            rows = min(rows, max(bucket.rows for bucket in now if bucket.decodes >= decodes))
            bucket = choose_bucket(now, decodes, tokens, chunks, rows)
        return bucket, _narrowed(bucket, variant)

    def run(self, key: Key, *arguments: Any) -> Any:
        """Runs a program, and compiles it first if it is missing."""
        self.used.add(key)
        if key in self._jobs:
            wait_for([self._jobs[key]])
            self._collect()
        program = self._kept.get(key)
        if key not in self._made or (self._keeps and program is None):
            program = self._make(key)
        if self._keeps:
            assert program is not None
            return program(*arguments)
        static = self._shapes.static(*key)
        return jitted(static["layout"], static["backend"])(*arguments, **static)

    # Compiling

    def compile_ahead(self, variants: Sequence[Variant], free: int | None) -> None:
        """Compiles all sizes of some variants, of which the first covers the others, and the functions that run between
        their steps. Raises NoRoomError where a program that holds every step takes more than `free` bytes."""
        jobs = self.start(variants, free)
        try:
            self._compiling().wait(jobs)
        finally:
            self.stop()
        self._raise_failure(variants)

    def start(self, variants: Sequence[Variant], free: int | None) -> list[Future]:
        """Starts compile_ahead in the background, and returns all its jobs. Returns once the functions between steps
        and the first variant's program that holds every step are compiled: all requests can run."""
        self._free = free
        if self.in_step:
            for variant in variants:
                self.permit(variant)
        try:
            shapes = self._shapes
            others = shapes.copying(), *shapes.putting(), *shapes.masking(variants[0])
            jobs = [self._compiling().add(other) for other in others]
            for bucket, variant in product(self._buckets, variants):
                self._begin(bucket, variant)
            first = [self._jobs[key] for key in _parts(self._buckets[0], variants[0]) if key in self._jobs]
            coming = [*jobs, *self._jobs.values()]
            self._compiling().wait([*jobs, *first], coming)
            self._collect()
            self._raise_failure(variants)
        except BaseException:
            self.stop()
            for variant in variants:
                self._failed.pop(variant, None)
            raise
        self.ahead = True
        return coming

    def _raise_failure(self, variants: Sequence[Variant]) -> None:
        for variant in variants:
            if variant in self._failed:
                raise self._failed.pop(variant)

    def prepare(self, variant: Variant) -> None:
        """Starts to compile, in the background, the least that a variant needs: the functions between its steps, and
        the program that holds every step."""
        if self._jobs.keys().isdisjoint(keys := _parts(self._buckets[0], variant)) and not self._made.issuperset(keys):
            self._beside += [(variant, self._compiling().add(recipe)) for recipe in self._shapes.masking(variant)]
        self._begin(self._buckets[0], variant)

    def take_failures(self) -> dict[Variant, BaseException]:
        """Returns the variants that failed to compile since the last call, and their errors."""
        self._collect()
        failed, self._failed = self._failed, {}
        return failed

    @property
    def compiling(self) -> bool:
        """Returns whether programs are being compiled in the background."""
        return not all(job.done() for job in self._jobs.values())

    def wait(self, seconds: float | None) -> None:
        """Waits until one of the programs in the background is compiled, for at most `seconds` (None: no limit)."""
        wait_for(self._jobs.values(), seconds, FIRST_COMPLETED)

    def describe(self, shapes: StepShapes) -> None:
        """Takes the shapes of other weights, which are the same ones: the old weights are not held any longer."""
        self._shapes = shapes

    def forget_files(self) -> None:
        """Drops all kept programs and deletes the files of loaded ones, since one of them may have failed. Does nothing
        without files."""
        if self._files is not None:
            self._kept.clear()
        for path in self._loaded:
            path.unlink(missing_ok=True)
        self._loaded.clear()

    def stop(self) -> None:
        """Cancels compilations that have not begun, and waits for the others."""
        if self._compiler is not None:
            self._compiler.close()
        self._collect()
        self._jobs.clear()
        self._beside.clear()
        self._compiler = None

    def close(self) -> None:
        """Drops everything that holds device memory."""
        self.stop()
        self._kept.clear()
        del self._shapes

    def path(self, bucket: Bucket, variant: Variant, part: str = WHOLE_STEP) -> Path | None:
        """Returns the path of a program's file; None without files, or without a key."""
        if self._files is None:
            return None
        key = bucket, variant, part
        return self._files.path(self._shapes.arguments(*key), self._shapes.static(*key))

    def _narrowest(self, need: Variant) -> Variant | None:
        covers = [variant for variant in self._open if variant.covers(need)]
        return min(covers, key=lambda v: (v.breadth, v.draws, repr(v)), default=None)

    def _keys(self, variant: Variant) -> list[Key]:
        """Returns the programs of a variant, the most needed first."""
        return [key for bucket in self._buckets for key in _parts(bucket, variant)]

    def _is_there(self, bucket: Bucket, variant: Variant) -> bool:
        return all(
            key in self._made or (key in self._permitted and key not in self._jobs) for key in _parts(bucket, variant)
        )

    def _begin(self, bucket: Bucket, variant: Variant) -> None:
        for key in _parts(bucket, variant):
            if key not in self._jobs and key not in self._made:
                self._jobs[key] = self._compiling().add(self._recipe(key))

    def _make(self, key: Key) -> jax.stages.Compiled:
        made = self._compiling().now(self._recipe(key))
        self._made.add(key)
        return made

    def _compiling(self) -> Compiler:
        self._compiler = self._compiler or Compiler(self.compiled, self._progress, self._processes, self._tells)
        return self._compiler

    def _recipe(self, key: Key) -> Recipe:
        """Returns a program's recipe. Call it in the thread whose JAX settings count."""
        path, static = self.path(*key), self._shapes.static(*key)
        files = partial(self._find, key, path), partial(self._keep, key, path), partial(self._claim, path)
        # The arguments come later: while a job waits, other weights may take the place of these.
        lower, step = partial(self._lower, key, **static), lambda: (self._shapes.arguments(*key), static)
        # What no request runs without is traced here at a start, while the processes that trace the others begin.
        here = key[0] == self._buckets[0] and not self._open and all(key[1] == variant for _, variant, _ in self._jobs)
        return Recipe(lower, *files, _name(key[0]), None if here else step)

    def _lower(self, key: Key, **static: Any) -> jax.stages.Lowered:
        return jitted(static["layout"], static["backend"]).lower(*self._shapes.arguments(*key), **static)

    def _find(self, key: Key, path: Path | None) -> jax.stages.Compiled | None:
        found = None if self._files is None or path is None else self._files.load(path)
        if found is not None:
            assert path is not None
            self._kept[key] = found
            self._loaded.add(path)
        return found

    def _claim(self, path: Path | None) -> AbstractContextManager[bool]:
        if self._files is None or path is None or self.in_step:
            return nullcontext(True)  # processes that share a model compile together: none may wait for another
        return self._files.claim(path)

    def _keep(self, key: Key, path: Path | None, made: jax.stages.Compiled) -> None:
        if self._keeps:
            self._kept[key] = made
        if self._files is not None and path is not None and not jax_cache_is_on():
            self._files.save(path, made)

    def _collect(self) -> None:
        """Takes in finished compilations. If a smaller program failed, the step that needs it compiles it again, and
        raises."""
        for variant, job in [beside for beside in self._beside if beside[1].done()]:
            self._beside.remove((variant, job))
            if not job.cancelled() and (error := job.exception()):
                self._failed[variant] = error
        for key in [key for key, job in self._jobs.items() if job.done()]:
            job, (bucket, variant, _) = self._jobs.pop(key), key
            error = CancelledError() if job.cancelled() else job.exception()
            try:
                if error is not None:
                    raise error
                if bucket == self._buckets[0]:
                    check_step(job.result(), self._shapes.sizes, self._shapes.pool_bytes, self._free)
                self._made.add(key)
                if self._made.issuperset(_parts(self._buckets[0], variant)):
                    self._open.add(variant)
            except CancelledError:
                pass
            except Exception as why:
                if bucket == self._buckets[0]:
                    self._failed[variant] = why
                else:
                    self._permitted.add(key)
        if not self._jobs and self._compiler is not None:
            self._compiler.close()  # its threads end
            self._compiler = None


def _name(bucket: Bucket) -> str:
    decodes = f"{bucket.decodes} decode{'' if bucket.decodes == 1 else 's'}"
    decodes += f" of {bucket.rows} rows" if bucket.rows > 1 else ""
    return f"{decodes} + {bucket.tokens} prompt tokens" if bucket.tokens else decodes


def _narrowed(bucket: Bucket, variant: Variant) -> Variant:
    """Returns the variant without prompt log-probabilities where a bucket has no prompt tokens."""
    return variant if bucket.tokens or not variant.prompt_logprobs else replace(variant, prompt_logprobs=False)


def _parts(bucket: Bucket, variant: Variant) -> list[Key]:
    parts = (FORWARD, SAMPLE) if variant.guided else (WHOLE_STEP,)
    return [(bucket, _narrowed(bucket, variant), part) for part in parts]


def _usual_processes(shapes: StepShapes, files: bool) -> int:
    """Returns how many processes trace for an engine that is not told: some for a GPU, if there are files. A CPU's
    steps are traced quickly, and those of a mesh cannot be traced elsewhere. Without files, engines of one process
    share the programs that this process traced."""
    on_gpu = shapes.config.mesh is None and shapes.home is not None and shapes.home.platform == "gpu"
    return usual_processes() if files and on_gpu else 0
