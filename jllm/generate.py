"""Runs `python -m jllm.generate`, the command line. The code is in jllm/cli.

`jllm.generate` is also the library's function. Python binds an imported submodule to its name in the package, so this
module can be called like the function.
"""

import sys
from types import ModuleType

if __name__ == "__main__":
    from jllm.cli.interrupt import catch_interrupts

    with catch_interrupts():
        from jllm.cli.main import main

        status = main()
    sys.exit(status)


class _Callable(ModuleType):
    def __call__(self, *args, **options):
        from jllm.api import generate

        return generate(*args, **options)


sys.modules[__name__].__class__ = _Callable
