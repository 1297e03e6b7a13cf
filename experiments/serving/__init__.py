"""A workload of conversations: its requests, the engine that serves it, and one run of it."""
