"""Exports the engine's metrics and counts of answers in Prometheus' format."""

from collections.abc import Callable, Iterator, Mapping
from typing import Any

from prometheus_client import CollectorRegistry, Counter, generate_latest
from prometheus_client.core import Metric

from jllm.engine.metrics import PERCENTILES

GAUGES = ("running", "waiting", "fragmentation", "slack", "empty_tokens", "cached_pages", "page_size", "version")
PREFIX = "jllm_"


class Exporter:
    """Is a collector with its own registry, so that several servers may run in one process."""

    def __init__(self, read: Callable[[], Mapping[str, object]]):
        self._read, self._registry = read, CollectorRegistry()
        text = "Requests that were answered, by path and status"
        self._answers = Counter(f"{PREFIX}http_requests", text, ("path", "status"), registry=self._registry)
        self._registry.register(self)

    def count(self, path: str, status: int) -> None:
        self._answers.labels(path, str(status)).inc()

    def text(self) -> bytes:
        """Returns the metrics. Waits for the end of the running step."""
        return generate_latest(self._registry)

    def describe(self) -> list[Metric]:
        return []  # registering would read the engine otherwise

    def collect(self) -> Iterator[Metric]:
        for name, value in self._read().items():
            if isinstance(value, Mapping) and name.endswith("_s"):
                yield summary(name, value)
            elif isinstance(value, int | float) and not isinstance(value, bool):
                gauge = name in GAUGES or name.startswith("pages_") or name.endswith(("_mean", "_peak", "_share"))
                family = Metric(PREFIX + name, name.replace("_", " "), "gauge" if gauge else "counter")
                family.add_sample(PREFIX + name + ("" if gauge else "_total"), {}, value)
                yield family


def summary(name: str, table: Mapping[str, Any]) -> Metric:
    """Returns a summary of times, in seconds, with their quantiles."""
    full = PREFIX + name.removesuffix("_s") + "_seconds"
    family = Metric(full, name.removesuffix("_s").replace("_", " "), "summary")
    for percent in PERCENTILES:
        if table[f"p{percent}"] is not None:
            family.add_sample(full, {"quantile": str(percent / 100)}, table[f"p{percent}"])
    family.add_sample(f"{full}_count", {}, table["count"])
    family.add_sample(f"{full}_sum", {}, table["count"] * (table["mean"] or 0.0))
    return family
