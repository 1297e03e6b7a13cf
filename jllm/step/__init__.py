"""Runs one merged step: `jllm.step(params, state, batch, config=...) -> state, outputs` (merge.py).

`jllm.step` is also the library's function. Python binds an imported package to its name in its parent, so this package
can be called like the function. It also has the function's attributes (`jllm.step.lower`).
"""

import sys
from types import ModuleType
from typing import Any


class _Callable(ModuleType):
    def __call__(self, *args: Any, **options: Any) -> Any:
        from jllm.step.merge import step

        return step(*args, **options)

    def __getattr__(self, name: str) -> Any:
        from jllm.step.merge import step

        if name in ("lower", "eval_shape", "trace", "_cache_size", "__wrapped__", "__signature__"):
            return getattr(step, name)
        raise AttributeError(f"module {self.__name__!r} has no attribute {name!r}")


sys.modules[__name__].__class__ = _Callable
