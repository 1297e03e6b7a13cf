"""Says what the Hopper kernels of route support. Imports no Pallas."""

import jax

from pallas_kernels.checks import check_listed

PIECE, LARGEST_WIDTH = 64, 16384
MOST_EXPERTS, MOST_CHOSEN = 512, 32
MOST_TOKENS = 1024  # whose rows a kernel arranges: each of its blocks reads all tokens' masks


def check_supported(scores: jax.Array, x: jax.Array, chosen: int, whole: bool) -> None:
    """Raises NotImplementedError for what the kernels do not do, naming what they do. whole: all experts are here."""
    experts = scores.shape[1]
    floats = "bfloat16", "float16"
    check_listed(("scores in", str(scores.dtype), (*floats, "float32")), ("rows of", str(x.dtype), floats))
    tokens, width = x.shape
    if not tokens or width % PIECE or not PIECE <= width <= LARGEST_WIDTH:
        raise NotImplementedError(
            f"x of {x.shape} is not supported by backend mosaic, which does at least one row, and multiples of {PIECE} "
            f"up to {LARGEST_WIDTH}"
        )
    if experts % 4 or experts > MOST_EXPERTS or chosen > MOST_CHOSEN or not whole:
        raise NotImplementedError(
            f"{chosen} of {experts} experts{'' if whole else ', some on other devices,'} are not supported by backend "
            f"mosaic, which does at most {MOST_CHOSEN} of multiples of 4 up to {MOST_EXPERTS}, all on one device"
        )
