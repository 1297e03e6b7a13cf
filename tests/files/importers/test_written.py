"""Files that other packages wrote (tests/data/make_written.py): read as the package decodes them, and what our own
rounding of the same model makes of them."""

from pathlib import Path

import numpy as np
import pytest

import jllm
from jllm.files.importers import block_floats
from jllm.model.params import matrices
from jllm.quant.quantize import quantize
from pallas_kernels.formats.quantized_weights import decode
from tests.files.importers.layouts import LINEARS

WRITTEN = Path(__file__).parents[2] / "data" / "written"
FLOAT32, HALF = 2.0**-22, 2.0**-11  # what one and two roundings to these may move a weight by, relative
# what it is here, and how far its weights may be off: compressed-tensors divides by NVFP4's float32, bitsandbytes
# by 127, and here both multiply; nested scales become float16
CASES = {
    "compressed-nvfp4": ("nvfp4", FLOAT32),
    "compressed-mxfp4": ("mxfp4", 0),
    "compressed-mxfp8": ("mxfp8", 0),
    "modelopt-nvfp4": ("nvfp4", 0),
    "modelopt-fp8": ("fp8", 0),
    "bitsandbytes-fp4": ("fp4", 0),
    "bitsandbytes-fp4-dq": ("fp4", HALF),
    "bitsandbytes-nf4": ("nf4", 0),
    "bitsandbytes-int8": ("llm-int8", FLOAT32),
    "transformers-fp8-blocks": ("fp8-b128", 0),
}
# compressed-tensors rounds an MX block's largest magnitude before it takes the power of two, where the specification
# takes the power below; ModelOpt's FP8 has a scale a tensor; nested scales are no rounding to nearest
SAME_ROUNDING = ("compressed-nvfp4", "modelopt-nvfp4", "bitsandbytes-fp4", "bitsandbytes-nf4", "bitsandbytes-int8")


def decoded(params) -> dict[str, np.ndarray]:
    """float32 [N, K] of each linear layer, by field."""
    return {field: np.asarray(decode(leaf)) for field, leaf in matrices(params.layers[0]).items()}


def stored(case: str) -> dict[str, np.ndarray]:
    """The same by the package."""
    parts = np.load(WRITTEN / case / "decoded.npz")
    return {
        field: np.concatenate([parts[f"model.layers.0.{name}"] for name, _ in entry.modules])
        for field, entry in LINEARS.items()
    }


def furthest(got: dict[str, np.ndarray], want: dict[str, np.ndarray]) -> float:
    """The largest difference relative to the value, of which none is lost."""
    assert got.keys() == want.keys()
    return max(float((np.abs(got[k] - want[k]) / np.where(want[k] == 0, 1e-30, np.abs(want[k]))).max()) for k in want)


@pytest.mark.parametrize("case", CASES)
def test_read_as_the_package_decodes(case):
    fmt, tolerance = CASES[case]
    params = jllm.load(WRITTEN / case).params
    assert {leaf.format.name for leaf in matrices(params.layers[0]).values()} == {fmt}
    assert furthest(decoded(params), stored(case)) <= tolerance


@pytest.mark.parametrize("case", SAME_ROUNDING)
def test_our_rounding_is_as_near(case):
    """Few weights are not what the package made of them: those that lie in the middle of two values."""
    plain = jllm.load(WRITTEN / "plain").params
    exact = {field: np.asarray(w, np.float32) for field, w in matrices(plain.layers[0]).items()}
    ours, theirs = decoded(quantize(plain, CASES[case][0])), stored(case)
    for field, w in exact.items():
        if case == "compressed-nvfp4" and len(LINEARS[field].modules) > 1:
            continue  # there each module has a float32 of its own
        apart = np.abs(ours[field] - theirs[field]) > 1e-6 * np.abs(w).max()
        assert apart.mean() < 4e-3
        errors = [np.abs(found[field] - w)[apart] for found in (ours, theirs)]
        np.testing.assert_allclose(*errors, rtol=1e-5, atol=1e-5 * np.abs(w).max())


def test_nibbles_that_are_swapped_are_seen(monkeypatch):
    """The fault of another order of columns, in a file that another package wrote."""
    whole = block_floats.read

    def swapped(module, tensors, *args):
        codes = tensors["weight_packed"]
        return whole(module, {**tensors, "weight_packed": codes << np.uint8(4) | codes >> np.uint8(4)}, *args)

    monkeypatch.setattr(block_floats, "read", swapped)
    assert furthest(decoded(jllm.load(WRITTEN / "compressed-mxfp4").params), stored("compressed-mxfp4")) > 1
