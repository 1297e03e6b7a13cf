"""Computes the forward pass: arrays in, arrays out. Nothing in it depends on a step or an engine."""
