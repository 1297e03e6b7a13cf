"""Runs `python -m jllm.batch`. The code is in jllm/serve/batch.py."""

import runpy

if __name__ == "__main__":
    runpy.run_module("jllm.serve.batch", run_name="__main__")
