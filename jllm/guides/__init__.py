"""Constrains texts by llguidance: guides as values, and matchers of a text against them."""
