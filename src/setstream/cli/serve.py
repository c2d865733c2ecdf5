"""`setstream serve`: a model and its states behind HTTP."""

from __future__ import annotations

import os
from pathlib import Path

import torch
from rich.console import Console

from setstream.data.files import need
from setstream.store import StateStore
from setstream.tasks.loading import open_model
from setstream.training.processes import choose_device


def run_serve(
    model: str,
    states: str,
    *,
    host: str,
    port: int,
    token_file: Path | None,
    allow_host: list[str],
    max_body: int,
    max_elements: int,
    max_sets: int,
    connections: int,
    grace: int,
    threads: int,
    device: str,
    log_level: str,
    console: Console,
) -> None:
    """Open the model and the store, and serve them."""
    for library in ("fastapi", "uvicorn", "websockets", "prometheus_client"):
        need(library, "serve", "the service")
    from setstream.serve.options import LOOPBACK_NAMES, TOKEN_VARIABLE, Options, is_loopback, read_tokens
    from setstream.serve.run import make_server, run

    tokens = read_tokens(os.environ.get(TOKEN_VARIABLE), token_file)
    local = is_loopback(host)
    if not local and not tokens:
        console.print(
            f"[yellow]no tokens:[/yellow] everybody who can reach {host} may read and change all sets. "
            f"Set {TOKEN_VARIABLE} or give --token-file.",
            soft_wrap=True,
            highlight=False,
        )
    options = Options(
        tokens=tokens,
        hosts=(*(LOOPBACK_NAMES if local else ()), *(name.lower() for name in allow_host)),
        max_body=max_body,
        max_elements=max_elements,
        max_sets=max_sets,
        max_waiting=max(16 * max_body, 256 * 2**20),
    )
    torch.set_num_threads(threads)
    opened = StateStore(states, open_model(model).to(choose_device(device)))
    where = {"host": host, "log_level": log_level}
    run(make_server(opened, options, name=model, port=port, connections=connections, grace=grace, **where))
