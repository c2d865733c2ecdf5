"""`setstream serve`: a model and its states over HTTP."""

import os
import sys
from functools import partial
from pathlib import Path
from typing import Any

import torch

from setstream.cli.command import File, Text, Words, console, error_console, pop_opening
from setstream.errors import ConfigurationError, MismatchError
from setstream.serve.app import listen, make_server
from setstream.serve.options import LOOPBACK_NAMES, TOKEN_VARIABLE, Options, is_loopback, read_tokens
from setstream.stores.store import StateStore
from setstream.stores.tiling import Retention
from setstream.tasks.loading import open_model


def run_serve(
    model: str,
    states: Text,
    tile: float | None,
    retention: Text,
    host: str,
    port: int,
    token_file: File,
    allow_host: Words,
    threads: int,
    chunks: Text,
    **more: Any,
) -> None:
    """Open the model and the store, and serve them; `more` are options of `open_model`, `Options` and `make_server`."""
    tokens = read_tokens(os.environ.get(TOKEN_VARIABLE), token_file)
    local = is_loopback(host)
    if not local and not tokens:
        warning = f"every client that can reach {host} may read and change all sets. Set {TOKEN_VARIABLE} or give --token-file."
        error_console.print(f"[yellow]no tokens:[/yellow] {warning}", soft_wrap=True)
    hosts = (*(LOOPBACK_NAMES if local else ()), *(name.lower() for name in allow_host or []))
    limits = {name: more.pop(name) for name in ("max_body", "max_elements", "max_sets")}
    options = Options(tokens, hosts, **limits, max_waiting=max(16 * limits["max_body"], 256 * 2**20))
    torch.set_num_threads(threads)
    network = open_model(model, **pop_opening(more))
    with listen(host, port) as socket:
        try:
            kept = parse_retention(retention)
            opened = StateStore(states or states_of(model), network, tile=tile, retention=kept, chunks=chunks)
        except MismatchError as error:  # its message holds no password
            raise MismatchError(f"{error}. For {model}, give --states and the name of a new file") from error
        end = f", states in {opened.rows.place}   (Ctrl-C stops it)\n"
        ready = partial(console.print, model, "at", end=end, markup=False, soft_wrap=True)
        # Seconds that a thread may hold the interpreter while another waits. The writer computes all the time under load;
        # Python's default of 5 ms would be added to every step of every request.
        sys.setswitchinterval(0.0005)
        make_server(opened, options, name=model, host=host, ready=ready, **more).run([socket])


def parse_retention(text: str | None) -> Retention | None:
    """How long tiles are kept: seconds, or SIZE:SECONDS for each size of tiles, separated by commas.

    >>> parse_retention("604800"), parse_retention("3600:604800,86400:inf")
    (604800.0, {3600.0: 604800.0, 86400.0: inf})
    """
    try:
        if text is None or ":" not in text:
            return None if text is None else float(text)
        return {float(size): float(age) for size, age in (pair.split(":") for pair in text.split(","))}
    except ValueError:
        raise ConfigurationError(f"--retention is seconds, or SIZE:SECONDS,SIZE:SECONDS,...; got {text!r}") from None


def states_of(model: str) -> str:
    """The default file for the states of a model, in the current folder: models cannot share one."""
    return f"{Path(model.rpartition(':')[2]).resolve().name}.db"
