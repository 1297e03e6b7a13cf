"""Holds the parts of experiments.speculation."""
