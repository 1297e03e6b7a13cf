"""Compiled steps: how they are traced, compiled, kept in files and found again."""
