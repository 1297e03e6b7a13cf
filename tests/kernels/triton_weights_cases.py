"""Calls of weight_only_matmul under backend triton, and what their errors may be."""

import jax
import numpy as np

from pallas_kernels.formats.weight_formats import TABLES
from pallas_kernels.weight_only_matmul import reference, weight_only_matmul
from pallas_kernels.weight_only_matmul.cases import Case
from tests.kernels.helpers import TOLERANCE, error


def run(case: Case, arrays: tuple, backend: str = "triton") -> jax.Array:
    x, w, bias, residual = arrays
    return weight_only_matmul(x, w, bias=bias, residual=residual, out_dtype=case.out_dtype, backend=backend)


def allowed(case: Case, out: jax.Array, expected: np.ndarray) -> float:
    """Returns the largest error of a row as a share of what is allowed: of rounding the result, and entries of tables
    too."""
    kinds = [case.out_dtype or case.dtype] + ([case.dtype] if case.format.partition("-")[0] in TABLES else [])
    rows = (np.asarray(y).astype(np.float64).reshape(-1, 1, case.n) for y in (out, expected))
    return error(*rows) / sum(TOLERANCE[kind] for kind in kinds)


def within(case: Case, out: jax.Array, arrays: tuple) -> bool:
    return allowed(case, out, reference.weight_only_matmul(*arrays)) < 1
