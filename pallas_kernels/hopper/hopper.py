"""Holds an H200's sizes, as the configurations of all kernels have them. Imports no Pallas."""

SMS = 132  # multiprocessors
SHARED_MEMORY = 227 * 1024  # bytes that a CTA may have; one of a multiprocessor's 228 KB each CTA takes for itself
CACHED = 18 << 20  # bytes that the L2 cache of 50 MB surely keeps while others pass through it
