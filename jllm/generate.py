"""`python -m jllm.generate`, the command line; jllm/cli has the code.

`jllm.generate` is also the library's function, and Python binds an imported submodule to its name in the package. So
when this file is imported rather than run, it puts the function in its own place (the import system takes what it then
finds in sys.modules): `jllm.generate(...)` means the function, whatever was imported before.
"""

import sys

if __name__ == "__main__":
    from jllm.cli.interrupt import catch_interrupts

    with catch_interrupts():
        from jllm.cli.main import main

        status = main()
    sys.exit(status)
else:
    from jllm.api import generate

    sys.modules[__name__] = generate  # type: ignore[assignment]
