"""Simulates the scheduler and its KV policies in simulated time, without arrays, on a device with computed costs."""
