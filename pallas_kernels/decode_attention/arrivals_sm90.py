"""Copies that do not arrive at their barrier: it only expects their bytes.

Pallas's own arrive with every thread of a warp, twice a copy, and threads that arrive at one barrier take turns. Many
small copies are better followed by one arrival. Written for JAX 0.11.2, whose lowering this goes through.
"""

from typing import Any

import jax
from jax._src import core as jax_core
from jax._src.pallas.mosaic_gpu import core as gpu_core
from jax._src.pallas.mosaic_gpu import lowering, primitives
from jax._src.state import primitives as state_primitives
from jax.experimental.mosaic import gpu as mgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith

_LANES = 32

_copy_p = jax_core.Primitive("copy_gmem_to_smem_without_arrival")
_copy_p.multiple_results = True


def copy_without_arrival(source: Any, target: Any, barrier: Any) -> None:
    """What plgpu.copy_gmem_to_smem does, in a single warp, but its arrival: `barrier` also waits for these bytes if an
    arrival follows."""
    refs, trees, flat = [], [], []
    for ref in (source, target, barrier):
        ref, transforms = state_primitives.get_ref_and_transforms(ref, None, "copy_without_arrival")
        leaves, tree = jax.tree.flatten(transforms)
        refs.append(ref)
        trees.append(tree)
        flat += leaves
    _copy_p.bind(
        *refs, *flat, src_transforms_treedef=trees[0], dst_transforms_treedef=trees[1],
        barrier_transforms_treedef=trees[2],
    )  # fmt: skip


_REST = {"collective_axes": None, "leader_tracked": None, "oob_mode": None, "has_user_predicate": False}


@_copy_p.def_effectful_abstract_eval
def _abstract(*operands: Any, **trees: Any) -> Any:
    return primitives._copy_gmem_to_smem_abstract_eval(*operands, has_barrier=True, **trees, **_REST)


class _Expecting(mgpu.utils.BarrierRef):
    """A barrier that arrivals of copies reach as bytes only, from one lane."""

    def __getitem__(self, offset: Any) -> "_Expecting":
        one = super().__getitem__(offset)
        return _Expecting(one.base_address, one.offset, one.phases, one.num_barriers)

    def arrive(self, *_: Any, **__: Any) -> None:
        pass

    def arrive_expect_tx(self, tx_count: Any, predicate: Any = None) -> None:
        """tx_count: each lane's share of the bytes."""
        i32 = ir.IntegerType.get_signless(32)
        share = mgpu.c(tx_count, i32) if isinstance(tx_count, int) else tx_count
        mgpu.utils.inline_ptx(
            "mbarrier.expect_tx.relaxed.cta.shared::cta.b64 [$0], $1;",
            self.get_ptr(),
            arith.muli(share, mgpu.c(_LANES, i32)),
            predicate=mgpu.utils.single_thread_predicate(mgpu.utils.ThreadSubset.WARP),
            has_side_effects=True,
        )


@lowering.register_lowering_rule(_copy_p, *gpu_core.LANExWARP_SEMANTICS)
def _lower(ctx: Any, source: Any, target: Any, barrier: Any, *flat: Any, **trees: Any) -> Any:
    expecting = _Expecting(barrier.base_address, barrier.offset, barrier.phases, barrier.num_barriers)
    return primitives._copy_gmem_to_smem_lowering(
        ctx, source, target, expecting, *flat, has_barrier=True, **trees, **_REST
    )
