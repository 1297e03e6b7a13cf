"""Calls Triton kernels, and reads pages, rows and codes in them."""
