"""`setstream consume`: events from a stream into a store of states."""

import json
import sys
import threading
import time
from math import nan
from typing import Any, cast

import torch

from setstream._utils.import_path import find
from setstream._utils.memory import release_freed
from setstream._utils.optional import need
from setstream.cli.command import File, Text, console, pop_opening
from setstream.errors import ConfigurationError
from setstream.stores.consume import Consumer, Source
from setstream.stores.events import Fields
from setstream.stores.sources import Lines, RedisStream
from setstream.stores.store import StateStore
from setstream.tasks.loading import open_model
from setstream.training.processes import asked_to_stop

# Seconds between two lines about the progress.
REPORT = 10.0


def run_consume(
    model: str,
    source: str,
    states: str,
    tile: float | None,
    set_column: str,
    columns: Text,
    time_column: Text,
    dead_letters: File,
    batch: int,
    metrics_port: int | None,
    position: bool,
    threads: int,
    chunks: Text,
    **more: Any,
) -> None:
    """Consume until the source ends or a signal arrives; `more` are options of `open_model` and of the source."""
    torch.set_num_threads(threads)
    network, opened = open_model(model, **pop_opening(more)), open_source(source, **more)
    fields = Fields(set_column, tuple(columns.split(",")) if columns else (), time_column)
    stop = threading.Event()
    with StateStore(states, network, tile=tile, chunks=chunks) as store, asked_to_stop(stop):
        if position:
            there = None if opened.name is None else store.position(opened.name, opened.partition)
            console.print(0 if there is None else there)
            return
        consumer = Consumer(store, opened, fields=fields, batch=batch, dead_letters=dead_letters)
        if metrics_port is not None:
            publish(consumer, metrics_port)
        reported, released = time.monotonic(), 0
        while not stop.is_set() and consumer.step():
            if consumer.messages - released >= batch:
                release_freed()
                released = consumer.messages
            if time.monotonic() - reported >= REPORT:
                report(consumer)
                reported = time.monotonic()
        report(consumer)


def open_source(source: str, name: Text, partition: str, offsets: bool, stream: Text, group: str, consumer: str) -> Source:
    """The source that the command line names."""
    if source == "-":
        if offsets and name is None:
            raise ConfigurationError("--offsets are positions in the stream that --name names: give both")
        return Lines(sys.stdin.fileno(), name, partition, offsets)
    if source.startswith(("redis://", "rediss://", "unix://")):
        if stream is None:
            raise ConfigurationError("for Redis, --stream names the stream to read")
        return RedisStream(source, stream, group, consumer)
    return cast(Source, find(source, "source")())


def report(consumer: Consumer) -> None:
    """Write a line of JSON about the progress to the standard error."""
    facts = {"messages": consumer.messages, "elements": consumer.elements, "dead": consumer.dead}
    print(json.dumps(facts | {"position": consumer.position, "lag": consumer.source.lag()}), file=sys.stderr, flush=True)


def publish(consumer: Consumer, port: int) -> None:
    """Metrics for Prometheus at a port of this machine."""
    client = need("prometheus_client", "serve", "--metrics-port")
    registry = client.CollectorRegistry()
    client.ProcessCollector(registry=registry)
    for name, help, value in (
        ("messages", "Messages that were committed.", lambda: consumer.messages),
        ("elements", "Elements that were committed.", lambda: consumer.elements),
        ("dead_letters", "Messages that could not be read.", lambda: consumer.dead),
        ("lag", "Messages that wait in the source; NaN if that is not known.", lambda: consumer.source.lag()),
    ):
        gauge = client.Gauge(f"setstream_consumed_{name}", help, registry=registry)
        gauge.set_function(lambda value=value: nan if (now := value()) is None else now)
    client.start_http_server(port, "127.0.0.1", registry=registry)
