"""Fixtures of the tests of bulk encoding."""

import pickle
from contextlib import nullcontext

import pytest

from setstream.bulk import ray


@pytest.fixture
def without_cluster(monkeypatch):
    """The engine `ray` with one worker in this process; what goes to it and comes back is pickled, as on a cluster."""

    def in_order(workers, tasks):
        for task in tasks:
            yield pickle.loads(pickle.dumps(workers[0].encode(*pickle.loads(pickle.dumps(task)))))

    monkeypatch.setattr(ray, "cluster", lambda address, workers: nullcontext(1))
    monkeypatch.setattr(ray, "started", lambda workers, *given: nullcontext([ray.Worker(*given)]))
    monkeypatch.setattr(ray, "in_order", in_order)
