"""One merged step: what goes in, what comes out, and what happens to the state between two.

`jllm.step` is also the library's function, and Python binds an imported package to its name in the one above. So the
package can be called like the function, and has its attributes (`jllm.step.lower`).
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
