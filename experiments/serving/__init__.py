"""Serves a workload of conversations: its requests, the engine, and one run."""
