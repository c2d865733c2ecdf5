"""A small model behind a service, in this process or in one of its own."""

import json
import os
import signal
import subprocess
import sys
import threading
import time
from contextlib import contextmanager

import pytest
import torch
from fastapi.testclient import TestClient
from torch import nn

import setstream as ss
from setstream.serve import Options, create_app, make_server


def make(seed=0):
    torch.manual_seed(seed)
    encoder = ss.SetEncoder(nn.Linear(3, 8), ss.UMBC(8, num_slots=2, heads=2))
    return ss.SetModel(encoder, nn.Linear(8, 1)).eval()


@contextmanager
def serving(place, **options):
    """A client of a service in this process."""
    app = create_app(ss.StateStore(place, make()), Options(**options), "small")
    with TestClient(app, "http://localhost", raise_server_exceptions=False) as client:
        yield client


@pytest.fixture
def client(tmp_path):
    with serving(tmp_path / "states.db", max_body=2**16, max_elements=1000, max_sets=50) as opened:
        yield opened


@contextmanager
def listening(place, connections=4096, host="127.0.0.1", **options):
    """A server on a port of this machine, in a thread of this process; gives it and its address."""
    server = make_server(ss.StateStore(place, make()), Options(**options), connections=connections, host=host)
    thread = threading.Thread(target=server.run)
    thread.start()
    try:
        while not server.started:
            assert thread.is_alive()
            time.sleep(0.01)
        yield server, server.servers[0].sockets[0].getsockname()[1]
    finally:
        server.should_exit = True
        thread.join(30)


class Server:
    """`setstream serve` in a process of its own."""

    def __init__(self, states, *options, model="tests.serve.conftest:make", environment=None):
        command = [sys.executable, "-m", "setstream.cli", "serve", model, "--states", str(states), "--port", "0", *options]
        env = os.environ | {"OMP_NUM_THREADS": "1"} | (environment or {})
        self.process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=env)
        self.lines = []
        for line in self.process.stderr:
            self.lines.append(line)
            if "running on" in line:
                self.port = int(json.loads(line)["event"].rpartition(":")[2].split(" ")[0])
                break
        else:
            raise AssertionError("".join(self.lines))
        self.url = json.loads(line)["event"].split(" ")[2]

    def stop(self, number=signal.SIGTERM):
        """Signal it, and wait; gives its exit code and the rest of its log."""
        if self.process.poll() is None:
            self.process.send_signal(number)
        rest = self.process.stderr.read()
        return self.process.wait(30), rest

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.stop(signal.SIGKILL)
