"""What Mosaic GPU kernels for Hopper share."""
