"""`python -m jllm.batch`; jllm/serve/batch.py has the code."""

import runpy

if __name__ == "__main__":
    runpy.run_module("jllm.serve.batch", run_name="__main__")
