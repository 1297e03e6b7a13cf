"""Runs `python -m jllm.chat`. The code is in jllm/cli/chat."""

import sys

if __name__ == "__main__":
    from jllm.cli.interrupt import catch_interrupts

    with catch_interrupts():
        from jllm.cli.chat.main import main

        status = main()
    sys.exit(status)
