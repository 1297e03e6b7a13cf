"""Holds the claims that jllm is made to test, one module each: `python -m experiments.claims --help`."""
