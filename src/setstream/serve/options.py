"""The limits of a server, and its tokens."""

import ipaddress
import re
from dataclasses import dataclass
from pathlib import Path

from setstream.errors import ConfigurationError

TOKEN_VARIABLE = "SETSTREAM_TOKENS"
# What is allowed in a header, and in a WebSocket's list of protocols.
TOKEN = re.compile(r"[A-Za-z0-9._~-]{16,256}")
# Seconds before a body's average rate is looked at.
BODY_START = 5.0
LOOPBACK_NAMES = ("localhost", "127.0.0.1", "::1")


@dataclass(frozen=True)
class Options:
    """The limits of a server; a request beyond one gets a 4xx answer that names it.

    Args:
        tokens: The accepted tokens; empty: the server needs none.
        hosts: The host names that it answers to, against DNS rebinding; empty: any.
        max_body: Bytes per request.
        max_elements: Elements per request.
        max_sets: Sets in the store.
        max_waiting: Bytes of all requests that are being read or computed; beyond it, 429.
        max_url: Bytes of a request's URL.
        max_headers: Bytes of a request's first line and headers together.
        head_seconds: How long headers may take to arrive, from the connection or from their first byte.
        idle_seconds: How long a connection may be kept between two requests.
        body_seconds: How long a request's body may take to arrive.
        body_rate: The least average rate of a body, in bytes per second, after its first five seconds.
    """

    tokens: tuple[str, ...] = ()
    hosts: tuple[str, ...] = LOOPBACK_NAMES
    max_body: int = 16 * 2**20
    max_elements: int = 100_000
    max_sets: int = 1_000_000
    max_waiting: int = 256 * 2**20
    max_url: int = 2**13
    max_headers: int = 2**15
    head_seconds: float = 10.0
    idle_seconds: float = 20.0
    body_seconds: float = 30.0
    body_rate: int = 2**10

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            if not isinstance(value, tuple) and value <= 0:
                raise ConfigurationError(f"{name} must be positive; got {value}")
        if not all(map(TOKEN.fullmatch, self.tokens)):
            raise ConfigurationError(
                "a token has 16 to 256 letters, digits and . _ ~ -; one of the given tokens does not. "
                "Make one with: python -c 'import secrets; print(secrets.token_urlsafe(32))'"
            )


def read_tokens(environment: str | None, file: Path | None) -> tuple[str, ...]:
    """Tokens from the environment variable (separated by commas) or a file (one per line), not both."""
    if environment is not None and file is not None:
        raise ConfigurationError(f"tokens come from {TOKEN_VARIABLE} or from --token-file, not from both")
    try:
        texts = (environment or "").split(",") if file is None else file.read_text().splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigurationError(f"the tokens in {file} cannot be read: {error}") from error
    tokens = tuple(text.strip() for text in texts if text.strip())
    if not tokens and (environment is not None or file is not None):
        raise ConfigurationError(f"{file or TOKEN_VARIABLE} holds no token: for a server without tokens, give neither")
    return tokens


def is_loopback(host: str) -> bool:
    """Whether only this machine can reach a server that binds to this address."""
    try:
        return host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False
