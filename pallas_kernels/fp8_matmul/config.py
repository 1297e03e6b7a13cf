"""Configurations of fp8_matmul's kernels, by shape."""

from pallas_kernels.scaled_matmul.config import Config, choose

TUNED: dict[tuple[int, int], tuple[tuple[int, Config], ...]] = {}


def choose_config(m: int, n: int, k: int) -> Config:
    """The tuned configuration for x [M, K] and w [N, K]."""
    return choose(TUNED, m, n, k)
