"""What Prometheus reads at /metrics."""

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, ProcessCollector, generate_latest
from prometheus_client.exposition import CONTENT_TYPE_PLAIN_0_0_4

CONTENT_TYPE = CONTENT_TYPE_PLAIN_0_0_4
SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 10.0)


class Metrics:
    """The counters of one server."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        ProcessCollector(registry=self.registry)  # CPU seconds, memory, open files
        named = ["method", "route"]
        self.requests = Counter("setstream_requests", "Requests answered.", [*named, "status"], registry=self.registry)
        self.seconds = Histogram(
            "setstream_request_seconds", "From the first byte to the answer.", named, buckets=SECONDS, registry=self.registry
        )
        self.dropped = Counter(
            "setstream_connections_dropped", "Connections closed by the server, by reason.", ["reason"], registry=self.registry
        )
        self.elements = Counter("setstream_elements", "Elements committed.", registry=self.registry)
        self.body_bytes = Counter("setstream_body_bytes", "Bytes of request bodies.", registry=self.registry)
        self.rounds = Histogram(
            "setstream_round_changes",
            "Changes that shared a commit.",
            buckets=(1, 2, 4, 8, 16, 32, 64, 128, 256),
            registry=self.registry,
        )
        self.sets = Gauge("setstream_sets", "Sets in the store, as this server knows.", registry=self.registry)
        self.watchers = Gauge("setstream_watchers", "Open WebSockets.", registry=self.registry)

    def text(self) -> bytes:
        """All metrics, in the format of Prometheus."""
        return generate_latest(self.registry)
