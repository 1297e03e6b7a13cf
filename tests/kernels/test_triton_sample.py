"""Checks Triton's sample: interpreted against the definition, compiled for GPUs of four kinds, and run on a GPU."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.sample import sample
from pallas_kernels.sample.cases import arguments
from tests.kernels.helpers import same_bits
from tests.kernels.sample_helpers import extreme_rows, jax_arguments, misses, mixed_rows, odd_rows
from tests.kernels.triton_tools import CAPABILITIES, SHARED_MEMORY, cases_of, compile_for

pytest.importorskip("triton")  # of extras and development, for Linux alone


@pytest.mark.parametrize("capability", CAPABILITIES)
def test_compiles(capability, tmp_path, monkeypatch):
    """Expects it within the shared memory and the registers of a block, and nothing spilled."""
    from pallas_kernels.sample import triton

    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    for vocabulary in cases_of(capability, (128256, 300)):
        logits = jax.ShapeDtypeStruct((4, vocabulary), jnp.float32)
        of_row = ["float32", "int32", "float32", "float32"]
        arrays = (
            ["float32"], ["float32"] * 2 + of_row, ["float32"] * 2 + ["int32", "float32", "float32", "uint32"],
        )  # fmt: skip
        for launch, inputs in zip(triton.launches(logits), arrays, strict=True):
            made = compile_for(launch, inputs, capability)
            assert f".target sm_{capability}" in made.ptx
            assert made.shared <= SHARED_MEMORY[capability]
            assert made.spilled == 0
            assert made.registers * 32 * launch.num_warps <= 65536


@pytest.mark.parametrize(
    ("shape", "dtype", "message"),
    [
        ((2, 8), "float64", "logits of float64 is not supported by backend triton, which does float32, bfloat16"),
        ((0, 8), "float32", r"\[R, V\]=\[0, 8\] is not supported by backend triton, which does at least one row"),
    ],
)
def test_what_is_refused(shape, dtype, message):
    with jax.enable_x64(dtype == "float64"), pytest.raises(NotImplementedError, match=message):
        sample(jnp.zeros(shape, dtype), *arguments([{}] * 2 if shape[0] else [])[:5], backend="triton")


@pytest.mark.gpu
@pytest.mark.parametrize("vocabulary", [1, 3, 300, 4099, 32000, 128256])
@pytest.mark.parametrize("make", [mixed_rows, odd_rows, lambda vocabulary, _: extreme_rows(vocabulary)])
def test_gpu_matches_the_definition(make, vocabulary):
    if vocabulary == 1 and make not in (mixed_rows, odd_rows):
        pytest.skip("extreme rows have several logits")
    for seed in range(2):
        logits, asked = make(vocabulary, seed)
        arrays = jax_arguments(logits, asked, seed)
        tokens, finite = sample(*arrays, backend="triton")
        assert not misses(tokens, finite, logits, asked, seed)
        again, _ = sample(*arrays, backend="triton")
        alone, _ = sample(*(x[2:3] for x in arrays), backend="triton")
        assert same_bits(tokens, again)
        assert same_bits(tokens[2:3], alone)
        assert np.asarray(tokens).dtype == np.int32
