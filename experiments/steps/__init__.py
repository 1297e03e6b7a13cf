"""Whole steps of a model: how they are timed, and the least that they can take."""
