"""Formats of KV pages and weights, and the plain jnp that encodes, decodes and checks them."""
