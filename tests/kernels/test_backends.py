"""The remembered answer of ptxas, which JAX asks for while it lowers a kernel."""

import sys
from types import ModuleType, SimpleNamespace

import jax._src.lib
import pytest

from pallas_kernels import backends


def test_ptxas_is_asked_once(monkeypatch: pytest.MonkeyPatch):
    asked = []
    binding = SimpleNamespace(_get_ptxas_isa_version=lambda: asked.append(None) or 88)
    plugin = ModuleType("jax._src.lib.mosaic_gpu")
    plugin._mosaic_gpu_ext = binding  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "jax._src.lib.mosaic_gpu", plugin)
    monkeypatch.setattr(jax._src.lib, "mosaic_gpu", plugin, raising=False)
    backends._ask_ptxas_once()
    assert [binding._get_ptxas_isa_version() for _ in range(3)] == [88] * 3
    assert len(asked) == 1


@pytest.mark.gpu
def test_gpu_jax_asks_what_is_remembered():
    from jax._src.lib import mosaic_gpu

    assert mosaic_gpu._mosaic_gpu_ext._get_ptxas_isa_version.cache_info().maxsize is None
