"""Serves with more than one engine: replicas and routing, prefill and decode apart, and messages between processes."""
