"""Measures how much accuracy quantization costs, beside its speed."""
