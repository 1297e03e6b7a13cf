"""Traces and compiles steps, keeps them in files, and finds them again."""
