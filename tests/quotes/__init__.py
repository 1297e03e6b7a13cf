"""Sentences with figures of README.md and docs/, by what the figures are of.

Each module has its `QUOTES`: a sentence, as a format, and what the newest result files say that its figures are.
tests/test_figures.py holds the pages to them.
"""
