"""`python -m jllm.chat`; jllm/cli/chat has the code."""

import sys

if __name__ == "__main__":
    from jllm.cli.interrupt import catch_interrupts

    with catch_interrupts():
        from jllm.cli.chat.main import main

        status = main()
    sys.exit(status)
