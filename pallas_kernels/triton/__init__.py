"""What Triton kernels share: how they are called, and how they read pages, rows and codes."""
