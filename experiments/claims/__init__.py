"""Holds the claims that jllm tests, one module each. See `python -m experiments.claims --help`."""
