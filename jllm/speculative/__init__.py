"""Implements speculative decoding. Drafters propose tokens, the target verifies them in one step, and no token
changes."""
