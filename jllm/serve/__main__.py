"""Runs the server as `python -m jllm.serve`."""

import sys

from jllm.serve.main import main

if __name__ == "__main__":
    sys.exit(main())
