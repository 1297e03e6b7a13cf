"""Lists products of a mixture's experts that tests and benchmarks share, and routes of tokens to experts."""

from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True)
class Product:
    """Describes one product of a model's experts: x [M, K] by X weights [N, K], or two of that if gated. A token has
    `chosen` experts."""

    experts: int
    chosen: int
    n: int
    k: int
    gated: bool = False

    @property
    def rows(self) -> int:
        """Counts the rows of all experts' weights."""
        return self.experts * self.n * (2 if self.gated else 1)


PRODUCTS = {
    "qwen3-30b-a3b-gate-up": Product(128, 8, 768, 2048, gated=True),
    "qwen3-30b-a3b-down": Product(128, 8, 2048, 768),
    "gpt-oss-20b-gate-up": Product(32, 4, 5760, 2880),  # its gates are clamped: another operation
    "gpt-oss-20b-down": Product(32, 4, 2880, 2880),
}
TOKENS = (1, 32, 256, 4096)
FORMATS = ("bf16", "w8a8", "fp8", "w4a16-g128", "nf4", "mxfp4-weight")


def routed(product: Product, tokens: int, layer: int) -> np.ndarray:
    """Returns the rows of each expert i32[X] if every token takes distinct experts at random. One token of one layer
    takes other experts than one of the next, so that no cache has them."""
    rng, first = np.random.default_rng(layer), layer * product.chosen
    chosen = [rng.permutation(product.experts)[: product.chosen] for _ in range(tokens - 1)]
    chosen.append((first + np.arange(product.chosen)) % product.experts)
    return np.bincount(np.concatenate(chosen), minlength=product.experts).astype(np.int32)
