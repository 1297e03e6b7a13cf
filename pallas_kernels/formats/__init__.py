"""Defines formats of KV pages and weights, and encodes, decodes and checks them in plain jnp."""
