"""Which implementation of an operation runs."""

BACKENDS = ("xla", "reference")


def choose_backend(backend: str | None) -> str:
    """The backend to run: `backend` itself when named (there is no fallback), the best one available for None.

    Raises ValueError for an unknown name and NotImplementedError for one that has no implementation yet.
    """
    if backend is None:
        return "xla"
    if backend == "mosaic":
        raise NotImplementedError(f"no mosaic kernel yet; backends: {', '.join(BACKENDS)}")
    if backend not in BACKENDS:
        raise ValueError(f"unknown backend {backend!r}; backends: {', '.join(BACKENDS)}")
    return backend
