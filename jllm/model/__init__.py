"""The forward pass and its parts: arrays in, arrays out. It knows no step and no engine."""
