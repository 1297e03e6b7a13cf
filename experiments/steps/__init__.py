"""Times whole steps of a model, and computes their floors."""
