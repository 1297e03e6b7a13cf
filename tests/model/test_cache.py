"""The KV cache's formats by name."""

import jax.numpy as jnp
import pytest

from jllm.errors import ConfigError
from jllm.model.cache import parse_kv_cache
from pallas_kernels.formats.kv_formats import KVFormat, parse_format
from tests.tiny import CONFIG


def parsed(name: str | None) -> tuple[KVFormat, KVFormat]:
    return parse_kv_cache(name, CONFIG, jnp.bfloat16)


def test_one_format_for_both_or_one_for_each():
    def both(k: str, v: str):
        return parse_format(k, CONFIG.head_dim), parse_format(v, CONFIG.head_dim)

    assert parsed(None) == both("bf16", "bf16")
    assert parsed("int8-g8") == both("int8-g8", "int8-g8")
    assert parsed("k=int8-g8,v=f16") == parsed("v=f16, k=int8-g8") == both("int8-g8", "f16")


@pytest.mark.parametrize(
    "name",
    ["k=int8-g8", "v=f16", "k=bf16,k=f16", "k=bf16,v=f16,v=f16", "k=bf16,v=", "k=bf16,f16", "bf16,f16", "q=bf16"],
)
def test_each_of_k_and_v_once(name):
    with pytest.raises(ConfigError, match=r"give k=FORMAT,v=FORMAT, each once") as error:
        parsed(name)
    assert repr(name) in str(error.value)


@pytest.mark.parametrize("name", ["", "foo", "int8-g7", "k=foo,v=bf16"])
def test_unknown_formats(name):
    with pytest.raises(ConfigError, match="KV cache format") as error:
        parsed(name)
    assert "\n" not in str(error.value)
