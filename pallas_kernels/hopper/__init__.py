"""Has what Mosaic GPU kernels for Hopper share."""
