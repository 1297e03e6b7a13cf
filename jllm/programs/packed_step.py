"""Packs a step's batch into one i32 buffer, so that the host hands the device a single array.

Every step allocates a new buffer, because the runtime may still read the old one after dispatch.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache, partial
from typing import Any, NamedTuple

import jax
import numpy as np

from jllm.model.hooks import Hooks
from jllm.model.params import Params
from jllm.speculative.drafter import Drafter
from jllm.step.batch import PromptChunk, RaggedBatch, empty_batch, fill_batch
from jllm.step.buckets import Bucket
from jllm.step.forward import Logits, forward
from jllm.step.merge import STATIC, eager_step, sample_step
from jllm.step.state import State
from pallas_kernels.backends import DETERMINISTIC
from pallas_kernels.hopper.gemm_sm90.skinny_config import MOST_ROWS


@dataclass(frozen=True)
class Layout:
    """Holds where each field of a batch lies in its buffer (static under jit)."""

    bucket: Bucket
    deltas: int  # most page table changes of a step
    bias: int = 0  # logit bias entries a sequence; 0 leaves out penalties
    wanted: bool = True  # whether a later step may verify drafts
    tapped: int = 0  # rows whose tapped values it returns
    adapters: bool = False  # whether the params have some

    def empty(self) -> RaggedBatch:
        """Returns an empty batch of this size."""
        bucket = self.bucket
        sizes = {"deltas": self.deltas, "bias": self.bias, "width": bucket.rows, "tapped": self.tapped}
        return empty_batch(bucket.decodes, bucket.tokens, bucket.chunks, **sizes, adapters=self.adapters)

    @property
    def size(self) -> int:
        """Returns the number of integers in the buffer."""
        return _packing(self).empty.size

    def pack(self) -> tuple[np.ndarray, RaggedBatch]:
        """Returns an i32 buffer of an empty batch, and the batch as views into it that the host writes."""
        packing = _packing(self)
        buffer = packing.empty.copy()
        views = [buffer[at:end].view(dtype).reshape(shape) for at, end, dtype, shape in packing.fields]
        return buffer, jax.tree.unflatten(packing.tree, views)

    def unpack(self, buffer: jax.Array) -> RaggedBatch:
        """Returns the batch in a buffer, on the device, under jit."""
        packing = _packing(self)
        found = []
        for at, end, dtype, shape in packing.fields:
            part = buffer[at:end].reshape(shape)
            found.append(part if dtype == np.int32 else jax.lax.bitcast_convert_type(part, dtype))
        return jax.tree.unflatten(packing.tree, found)


class _Packing(NamedTuple):
    """Holds a layout's empty buffer, and where its fields lie."""

    empty: np.ndarray  # i32
    fields: list[tuple[int, int, np.dtype, tuple[int, ...]]]  # first, end, dtype and shape of each
    tree: jax.tree_util.PyTreeDef  # pytree structure of the batch


@cache
def _packing(layout: Layout) -> _Packing:
    """Returns a layout's packing. It is cached, since making it takes longer than the rest of packing."""
    leaves, tree = jax.tree.flatten(layout.empty())
    buffer = np.concatenate([leaf.reshape(-1).view(np.int32) for leaf in leaves])
    ends = np.cumsum([leaf.size for leaf in leaves]).tolist()
    fields = [(end - leaf.size, end, leaf.dtype, leaf.shape) for leaf, end in zip(leaves, ends)]
    buffer.setflags(write=False)
    return _Packing(buffer, fields, tree)


WHOLE_STEP, FORWARD, SAMPLE = "whole", "forward", "sample"  # a whole step, and its halves (jllm.step.merge)

_jit = partial(jax.jit, static_argnames=(*STATIC, "layout", "part"), donate_argnames="state")


@_jit
def packed_step(
    params: Params,
    state: State,
    buffer: jax.Array,
    drafter: Drafter | None = None,
    hooks: Hooks | None = None,
    logits: Logits | None = None,
    *,
    layout: Layout,
    part: str = WHOLE_STEP,
    **static: Any,
) -> tuple[State, Any]:
    """Runs merge.eager_step, or a half of it, on a packed batch, buffer i32[layout.size]. Donates the state.

    The first half returns Logits, which the second half takes. The second half and a whole step return Outputs.
    """
    if part == FORWARD:
        static.pop("draw", None)
        return forward(params, state, layout.unpack(buffer), hooks, **static)
    if part == SAMPLE:
        assert logits is not None
        batch = layout.unpack(buffer)
        return sample_step(params, state, batch, logits, drafter, hooks, wanted=layout.wanted, **static)
    return eager_step(params, state, layout.unpack(buffer), drafter, hooks, wanted=layout.wanted, **static)


# cuBLASLt adds a residual as it stores a product. XLA's own products in Triton leave that to another kernel.
MANY_ROWS: dict[str, bool | str] = {"xla_gpu_enable_triton_gemm": False}
_packed_step_of_many_rows = _jit(packed_step.__wrapped__, compiler_options=MANY_ROWS)  # type: ignore[attr-defined]


def compiler_options(layout: Layout, backend: str | None = None) -> dict[str, bool | str] | None:
    """Returns XLA's options for a step: MANY_ROWS where XLA multiplies so many rows. In one order, steps of all sizes
    have the same options."""
    return MANY_ROWS if layout.bucket.size > MOST_ROWS and backend != DETERMINISTIC else None


def jitted(layout: Layout, backend: str | None = None) -> Any:
    """Returns packed_step with the compiler_options of a layout."""
    return packed_step if compiler_options(layout, backend) is None else _packed_step_of_many_rows


def pack_chunks(layout: Layout, chunks: Sequence[PromptChunk] = (), decodes: Sequence[int] = ()) -> np.ndarray:
    """Returns the buffer of a step without a scheduler: prompt chunks, and slots that decode one token each."""
    buffer, batch = layout.pack()
    fill_batch(batch, chunks, decodes)
    return buffer
