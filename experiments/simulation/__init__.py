"""The scheduler and its KV policies on a device that is only costed: no arrays, simulated time."""
