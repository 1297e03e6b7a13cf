"""More than one engine: replicas and their routing, prefill and decode apart, and what travels between processes."""
