"""Runs the commands as `jllm` and `python -m jllm`. Each command is a module."""

import runpy
import sys
from difflib import get_close_matches

from pallas_kernels.starting import end_at_interrupts

COMMANDS = {
    "generate": ("jllm.generate", "continue prompts from the command line, standard input or a file"),
    "chat": ("jllm.chat", "chat in the terminal, or through a pipe"),
    "serve": ("jllm.serve", "serve the OpenAI API over HTTP"),
    "batch": ("jllm.serve.batch", "answer a file in OpenAI's batch format"),
    "eval": ("jllm.analysis.lm_eval", "run lm-eval's own command, with the model `jllm`"),
}
USAGE = f"""\
usage: jllm COMMAND [...]

{"\n".join(f"  {name:10}{what}" for name, (_, what) in COMMANDS.items())}

jllm COMMAND --help lists its options. Each is also a module:
python -m {", ".join(module for module, _ in COMMANDS.values())}.
"""


def main() -> None:
    """Runs the command that sys.argv names, as `python -m` would. Exits with the command's status, or with 2 if there
    is no command."""
    end_at_interrupts()
    name = sys.argv[1] if len(sys.argv) > 1 else ""
    if name in ("-h", "--help"):
        print(USAGE, end="")
        return
    if name == "--version":
        name, sys.argv[1:] = "generate", ["", "--version"]
    if name not in COMMANDS:
        near = get_close_matches(name, COMMANDS, 1)
        hint = f"did you mean {near[0]}?" if near else f"known are {', '.join(COMMANDS)}"
        sys.exit(_error(f"no command {name!r}: {hint}" if name else f"no command given: {hint}"))
    sys.argv[:2] = [f"jllm {name}"]
    # lm-eval starts processes, which look for the command in sys.modules.
    runpy.run_module(COMMANDS[name][0], run_name="__main__", alter_sys=name == "eval")


def _error(text: str) -> int:
    print(f"error: {text} (see --help)", file=sys.stderr)
    return 2


if __name__ == "__main__":
    main()
