"""What both products share: dtypes of results. Light to import."""

import jax
import jax.numpy as jnp

OUT_DTYPES = ("bfloat16", "float16", "float32")


def check_result(out_dtype: jnp.dtype, residual: jax.Array | None) -> None:
    """Raises NotImplementedError for dtypes that the kernels do not do, naming what they do."""
    if str(out_dtype) not in OUT_DTYPES:
        names = ", ".join(OUT_DTYPES)
        raise NotImplementedError(f"out_dtype {out_dtype} is not supported by backend mosaic, which does {names}")
    if residual is not None and residual.dtype != out_dtype:
        raise NotImplementedError(
            f"a {residual.dtype} residual is not supported by backend mosaic, which adds one of out_dtype, {out_dtype}"
        )
