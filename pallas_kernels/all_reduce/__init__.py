"""Sums over the devices of a mesh axis, after a matmul whose inputs were sharded over them."""

from pallas_kernels.all_reduce.api import all_reduce, make_calls_known
from pallas_kernels.all_reduce.axis import MeshAxis

__all__ = ["MeshAxis", "all_reduce", "make_calls_known"]
