"""A device whose steps sample by sorting each row's logits."""

from typing import Any

import jax
import jax.numpy as jnp

from jllm.batch import Bucket
from jllm.engine.device import Device
from jllm.sampling import Sampling, sample_reference
from jllm.state import Variant


def draw_by_sorting(
    logits: jax.Array, params: Sampling, position: jax.Array, *, backend: str | None
) -> tuple[jax.Array, jax.Array]:
    """As sampling.sample: a token for each row of logits f[rows, V], and which rows are finite."""
    return sample_reference(logits, params, position), jnp.isfinite(logits).all(axis=1)


class SortingDevice(Device):
    """Gives its steps another sampler."""

    def _static(self, bucket: Bucket, variant: Variant, part: str) -> dict[str, Any]:
        return super()._static(bucket, variant, part) | {"draw": draw_by_sorting}
