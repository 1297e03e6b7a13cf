"""Says what the Hopper kernels of route support. Imports no Pallas."""

import jax

from pallas_kernels.checks import check_listed, check_whole_rows

LARGEST_WIDTH = 16384
MOST_EXPERTS, MOST_CHOSEN = 512, 32
MOST_TOKENS = 1024  # whose rows a kernel arranges: each of its blocks reads all tokens' masks


def check_supported(scores: jax.Array, x: jax.Array, chosen: int, whole: bool) -> None:
    """Raises NotImplementedError for what the kernels do not do, naming what they do. whole: all experts are here."""
    experts = scores.shape[1]
    check_listed(("scores in", str(scores.dtype), ("bfloat16", "float16", "float32")))
    check_whole_rows("E", str(x.dtype), x.shape[0], x.shape[1], LARGEST_WIDTH)
    if experts % 4 or experts > MOST_EXPERTS or chosen > MOST_CHOSEN or not whole:
        raise NotImplementedError(
            f"{chosen} of {experts} experts{'' if whole else ', some on other devices,'} are not supported by backend "
            f"mosaic, which does at most {MOST_CHOSEN} of multiples of 4 up to {MOST_EXPERTS}, all on one device"
        )
