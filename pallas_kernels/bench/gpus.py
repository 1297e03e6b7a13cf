"""Asks nvidia-smi about GPUs, which a process may do before JAX claims their memory, or without it."""

import os
import subprocess

from pallas_kernels.starting import sees_gpu


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


def visible_gpus() -> list[str]:
    """Returns the GPUs that this process may use, as CUDA_VISIBLE_DEVICES names them. JAX opens none of them."""
    if not sees_gpu():
        return []
    which = os.environ.get("CUDA_VISIBLE_DEVICES")
    return [index for [index] in ask_gpus("index")] if which is None else [name.strip() for name in which.split(",")]


def leave_gpus() -> None:
    """Keeps JAX in this process off the GPUs, which other processes are to have. Call it before JAX first looks at its
    devices."""
    import jax

    jax.config.update("jax_platforms", "cpu")


def device_kind() -> str:
    """Returns JAX's name of the first device. After leave_gpus(), returns that of the first GPU."""
    import jax

    left = jax.config.jax_platforms == "cpu" and sees_gpu()
    found = ask_gpus("name") if left else []
    return found[0][0] if found else jax.devices()[0].device_kind
