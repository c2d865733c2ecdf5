"""What an operator reads: logs as JSON, one line per event, and the metrics at /metrics.

{"time": ..., "level": ..., "event": "request", "request": id, ...}
"""

import json
import logging
import sys
import time
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, ProcessCollector

SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 10.0)
CHANGES = (1, 2, 4, 8, 16, 32, 64, 128, 256)

logger = logging.getLogger("setstream.serve")


class JsonLines(logging.Formatter):
    """One JSON object per line; it includes what is given as extra={"facts": ...}."""

    def format(self, record: logging.LogRecord) -> str:
        """A line. Everything beyond ASCII is escaped, so that no id can forge a line."""
        when = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created)) + f".{int(record.msecs):03d}Z"
        line: dict[str, Any] = {"time": when, "level": record.levelname.lower(), "event": record.getMessage()}
        line |= getattr(record, "facts", {})
        if record.exc_info:
            line["error"] = self.formatException(record.exc_info)
        return json.dumps(line)


def log_config(level: str) -> dict[str, Any]:
    """For logging.config: our lines and uvicorn's, to the standard error."""
    shown = {"handlers": ["lines"], "level": level.upper(), "propagate": False}
    quiet = shown | {"level": "WARNING"}
    return {
        "version": 1,
        "disable_existing_loggers": False,
        "formatters": {"json": {"()": JsonLines}},
        "handlers": {"lines": {"class": "logging.StreamHandler", "formatter": "json", "stream": sys.stderr}},
        "loggers": {"setstream.serve": shown, "uvicorn": quiet, "uvicorn.error": shown, "uvicorn.access": quiet},
    }


class Metrics:
    """The counters of one server."""

    def __init__(self) -> None:
        self.registry = registry = CollectorRegistry()
        ProcessCollector(registry=registry)  # CPU seconds, memory, open files
        named, seconds = ["method", "route"], "From the first byte to the answer."
        self.requests = Counter("setstream_requests", "Requests answered.", [*named, "status"], registry=registry)
        self.seconds = Histogram("setstream_request_seconds", seconds, named, buckets=SECONDS, registry=registry)
        reasons = "Connections closed by the server, by reason."
        self.dropped = Counter("setstream_connections_dropped", reasons, ["reason"], registry=registry)
        self.elements = Counter("setstream_elements", "Elements committed.", registry=registry)
        self.body_bytes = Counter("setstream_body_bytes", "Bytes of request bodies.", registry=registry)
        shared = "Changes that shared a commit."
        self.rounds = Histogram("setstream_round_changes", shared, buckets=CHANGES, registry=registry)
        self.sets = Gauge("setstream_sets", "Sets in the store, as this server knows.", registry=registry)
        self.watchers = Gauge("setstream_watchers", "Open WebSockets.", registry=registry)
