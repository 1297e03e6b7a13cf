"""Holds the evaluation texts of the project, and reads texts."""
