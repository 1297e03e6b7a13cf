"""Imports a user's own schemes, quantizers and KV formats, by the name package.module:NAME."""

import functools
import importlib
import os
import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import jax

from jllm.errors import ConfigError
from jllm.files.run_identity import digest
from jllm.model.model import Model
from jllm.model.params import map_linears
from jllm.quant.schemes import Scheme
from pallas_kernels.formats.kv_formats import KVFormat

KVFormats = KVFormat | tuple[KVFormat, KVFormat]


@dataclass(frozen=True)
class Quantizer:
    """A function that rounds a weight [outputs, inputs] of a linear layer, and its size in bytes."""

    name: str
    function: Callable[[jax.Array], jax.Array]

    @property
    def bytes_per_weight(self) -> float | None:
        """Returns the function's attribute `bits` as bytes, scales included, or None without one."""
        bits = getattr(self.function, "bits", None)
        return None if bits is None else bits / 8

    def of(self, model: Model) -> Model:
        """Returns the model with each linear weight rounded. Leaves may be jax.ShapeDtypeStruct."""
        return replace(model, params=map_linears(self._rounded, model.params))

    def _rounded(self, weight: str, value: Any) -> Any:
        shaped = isinstance(value, jax.ShapeDtypeStruct)
        try:
            found = jax.eval_shape(self.function, value) if shaped else self.function(value)
        except (TypeError, ValueError) as error:
            raise ConfigError(f"{self.name}: fails on {weight}: {str(error).partition(chr(10))[0]}") from None
        if getattr(found, "shape", None) != value.shape:
            got = getattr(found, "shape", type(found).__name__)
            raise ConfigError(f"{self.name}: must return a weight of the shape {value.shape}, not {got}, for {weight}")
        return jax.ShapeDtypeStruct(found.shape, value.dtype) if shaped else found.astype(value.dtype)


def is_own(name: str) -> bool:
    return ":" in name


@functools.cache
def own(name: str) -> Scheme | Quantizer | KVFormats:
    """Imports package.module:NAME, also from the current directory. Raises ConfigError if it is none of these."""
    module, _, attribute = name.partition(":")
    if os.getcwd() not in sys.path:
        sys.path.append(os.getcwd())
    try:
        value: Any = getattr(importlib.import_module(module), attribute)
        if isinstance(value, type) and issubclass(value, KVFormat):
            make: Any = value  # its fields may all have defaults
            value = make()
    except (Exception, SystemExit) as error:  # the module may raise anything
        why = f"{type(error).__name__}: {error}".partition("\n")[0]
        raise ConfigError(f"{name}: cannot be imported as package.module:NAME ({why})") from None
    if isinstance(value, Scheme):
        return replace(value, name=name)
    if isinstance(value, KVFormat) or (
        isinstance(value, tuple) and [isinstance(x, KVFormat) for x in value] == [True] * 2
    ):
        return value
    if callable(value) and not isinstance(value, type):
        return Quantizer(name, value)
    raise ConfigError(
        f"{name}: must be a Scheme, a KVFormat or a function of a weight [outputs, inputs], not {type(value).__name__}"
    )


def own_scheme(name: str) -> Scheme | Quantizer:
    found = own(name)
    if isinstance(found, Scheme | Quantizer):
        return found
    raise ConfigError(f"{name}: is a KV format, not a scheme of weights")


def own_kv(name: str) -> KVFormats:
    found = own(name)
    if isinstance(found, KVFormat | tuple):
        return found
    raise ConfigError(f"{name}: is a scheme of weights, not a KV format")


def source_of(name: str) -> str:
    """Returns a digest of the module's file, which changes when the file is edited."""
    own(name)
    file = getattr(sys.modules[name.partition(":")[0]], "__file__", None)
    return digest([Path(file).read_bytes() if file else name.encode()])
