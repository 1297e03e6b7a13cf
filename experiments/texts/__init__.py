"""Texts that come with the project to be evaluated on, where they are from, and how they are read."""
