"""Evaluates a program of the interpreter operation by operation, where XLA would compile it first, for seconds."""

from typing import Any

import jax
import numpy as np
from jax._src import callback
from jax._src import core as jax_core
from jax._src.pallas.mosaic.interpret import thread_map
from jax._src.pallas.mosaic_gpu.interpret import gpu_callbacks
from jax._src.pjit import jit_p


def run(jaxpr: jax_core.Jaxpr, consts: Any, *arguments: Any) -> None:
    """Runs a thread of a kernel. Where it fails, those that wait for it learn of that."""
    try:
        evaluate(jaxpr, consts, *arguments)
    except Exception as error:
        gpu_callbacks.fail(error, thread_map.NESTED_TOKEN_VALUE)
        raise


def evaluate(jaxpr: jax_core.Jaxpr, consts: Any, *arguments: Any) -> list[Any]:
    """Returns what the program returns. Loops and branches are Python's, and callbacks plain calls."""
    values: dict[Any, Any] = dict(zip(jaxpr.constvars, consts, strict=True))
    values.update(zip(jaxpr.invars, arguments, strict=True))

    def value(x: Any) -> Any:
        return x.val if isinstance(x, jax_core.Literal) else values[x]

    for eqn in jaxpr.eqns:
        inputs, rule = [value(x) for x in eqn.invars], RULES.get(eqn.primitive)
        if rule is not None:
            out = rule(inputs, **eqn.params)
        elif (simple := _simple(eqn)) is not None:
            with np.errstate(all="ignore"):  # integers wrap around
                out = [np.asarray(simple(*inputs, **eqn.params), eqn.outvars[0].aval.dtype)]
        else:
            out = eqn.primitive.bind(*inputs, **eqn.params)
            out = out if eqn.primitive.multiple_results else [out]
        values.update(zip(eqn.outvars, out, strict=True))
    return [value(x) for x in jaxpr.outvars]


def _simple(eqn: Any) -> Any:
    """Returns what numpy does as XLA does it, to the bit, if there is such a function. XLA compiles for each shape."""
    before, after = ({np.dtype(x.aval.dtype).kind in "iub" for x in some} for some in (eqn.invars, eqn.outvars))
    for functions, whole in ((MOVES, True), (ARITHMETIC, True), (OF_INTEGERS, False not in before | after)):
        if whole and eqn.primitive in functions:
            return functions[eqn.primitive]
    to_whole = True in after and False in before  # XLA cuts what is too large, where numpy has no rule
    return _convert if eqn.primitive is jax.lax.convert_element_type_p and not to_whole else None


def _closed(closed: Any, inputs: list[Any]) -> list[Any]:
    return evaluate(closed.jaxpr, closed.consts, *inputs)


def _while(
    inputs: list[Any], *, cond_jaxpr: Any, cond_nconsts: int, body_jaxpr: Any, body_nconsts: int, **_: Any
) -> list[Any]:
    of_cond, inputs = inputs[:cond_nconsts], inputs[cond_nconsts:]
    of_body, carry = inputs[:body_nconsts], inputs[body_nconsts:]
    while _closed(cond_jaxpr, [*of_cond, *carry])[0]:
        carry = _closed(body_jaxpr, [*of_body, *carry])
    return carry


def _scan(inputs: list[Any], *, jaxpr: Any, length: int, reverse: bool, ft_in: Any, ft_out: Any, **_: Any) -> list[Any]:
    consts, carry, columns = (list(x) for x in ft_in.update(inputs).unpack())
    rows: list[Any] = [()] * length
    for i in reversed(range(length)) if reverse else range(length):
        out = ft_out.update(_closed(jaxpr, [*consts, *carry, *(column[i] for column in columns)])).unpack()
        carry, rows[i] = (list(x) for x in out)
    return [*carry, *(np.stack(column) for column in zip(*rows, strict=True))]


def _cond(inputs: list[Any], *, branches: Any, **_: Any) -> list[Any]:
    index = min(max(int(inputs[0]), 0), len(branches) - 1)
    return _closed(branches[index], inputs[1:])


def _jit(inputs: list[Any], *, jaxpr: Any, **_: Any) -> list[Any]:
    return _closed(jaxpr, inputs)


def _divide(x: Any, y: Any) -> Any:
    """Rounds to zero, as XLA does."""
    quotient = np.abs(x) // np.abs(y)
    return np.where((x < 0) != (y < 0), -quotient, quotient)


def _select(which: Any, *cases: Any, **_: Any) -> Any:
    return np.choose(np.asarray(which, np.int32), cases)


def _convert(x: Any, *, new_dtype: Any, **_: Any) -> Any:
    return np.asarray(x).astype(new_dtype)


def _broadcast(x: Any, *, shape: Any, broadcast_dimensions: Any, **_: Any) -> Any:
    sizes = [1] * len(shape)
    for size, dimension in zip(np.shape(x), broadcast_dimensions, strict=True):
        sizes[dimension] = size
    return np.broadcast_to(np.reshape(x, sizes), shape)


def _iota(*, dtype: Any, shape: Any, dimension: int, **_: Any) -> Any:
    return _broadcast(np.arange(shape[dimension], dtype=dtype), shape=shape, broadcast_dimensions=(dimension,))


def _dynamic_slice(x: Any, *starts: Any, slice_sizes: Any) -> Any:
    begins = [
        min(max(int(start), 0), n - size) for start, n, size in zip(starts, np.shape(x), slice_sizes, strict=True)
    ]
    return x[tuple(slice(begin, begin + size) for begin, size in zip(begins, slice_sizes, strict=True))]


def _callback(inputs: list[Any], **params: Any) -> list[Any]:
    return [x.copy() for x in callback.io_callback_impl(*map(np.asarray, inputs), **params)]


RULES = {
    jax.lax.while_p: _while,
    jax.lax.scan_p: _scan,
    jax.lax.cond_p: _cond,
    jit_p: _jit,
    callback.io_callback_p: _callback,
    jax.lax.optimization_barrier_p: lambda inputs: inputs,
}

MOVES = {
    jax.lax.select_n_p: _select,
    jax.lax.broadcast_in_dim_p: _broadcast,
    jax.lax.dynamic_slice_p: _dynamic_slice,
    jax.lax.squeeze_p: lambda x, *, dimensions: np.squeeze(x, dimensions),
    jax.lax.reshape_p: lambda x, *, new_sizes, **_: np.reshape(x, new_sizes),
    jax.lax.iota_p: _iota,
    jax.lax.bitcast_convert_type_p: lambda x, *, new_dtype: (
        np.ascontiguousarray(x).view(new_dtype).reshape(np.shape(x))
    ),
}


def _elementwise(**functions: Any) -> dict[Any, Any]:
    return {getattr(jax.lax, f"{name}_p"): (lambda *xs, run=run, **_: run(*xs)) for name, run in functions.items()}


def _reduced(**functions: Any) -> dict[Any, Any]:
    return {
        getattr(jax.lax, f"reduce_{name}_p"): (lambda x, *, axes, run=run, **_: run(x, axis=axes))
        for name, run in functions.items()
    }


ARITHMETIC = _elementwise(
    add=np.add, sub=np.subtract, mul=np.multiply, max=np.maximum, min=np.minimum, neg=np.negative, abs=np.abs,
    eq=np.equal, ne=np.not_equal, lt=np.less, le=np.less_equal, gt=np.greater, ge=np.greater_equal,
) | _reduced(max=np.max, min=np.min)  # fmt: skip
OF_INTEGERS = (
    _elementwise(rem=np.fmod, div=_divide, sign=np.sign)
    | _elementwise(**{"and": np.bitwise_and, "or": np.bitwise_or, "xor": np.bitwise_xor, "not": np.bitwise_not})
    | _reduced(sum=np.sum)
    | {jax.lax.clamp_p: lambda low, x, high: np.minimum(np.maximum(x, low), high)}
)
