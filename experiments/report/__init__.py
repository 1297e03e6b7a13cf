"""Turns results into pages."""
