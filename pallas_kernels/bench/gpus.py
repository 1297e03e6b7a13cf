"""Asks nvidia-smi about GPUs, which a process may do before JAX claims their memory."""

import os
import subprocess


def ask_gpus(*names: str) -> list[list[str]]:
    """Returns these properties (`nvidia-smi --help-query-gpu`) of each GPU that this process sees, in its order. Sizes
    are in MiB and clocks in MHz. There is none where there is no GPU, or no nvidia-smi that tells."""
    which = os.environ.get("CUDA_VISIBLE_DEVICES")
    if which == "" or os.environ.get("JAX_PLATFORMS") == "cpu":
        return []
    command = ["nvidia-smi", f"--query-gpu={','.join(names)}", "--format=csv,noheader,nounits"]
    command += [] if which is None else ["-i", which]
    try:
        said = subprocess.run(command, capture_output=True, text=True, timeout=20, check=True).stdout
    except (OSError, subprocess.SubprocessError):
        return []
    return [[word.strip() for word in line.split(",")] for line in said.splitlines()]
