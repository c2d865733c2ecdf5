"""Logs as JSON, one line per event: {"time": ..., "level": ..., "event": "request", "request": id, ...}."""

import json
import logging
import sys
import time
from typing import Any

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
    handler = {"class": "logging.StreamHandler", "formatter": "json", "stream": sys.stderr}
    quiet = {"handlers": ["lines"], "level": "WARNING", "propagate": False}
    return {
        "version": 1,
        "disable_existing_loggers": False,
        "formatters": {"json": {"()": JsonLines}},
        "handlers": {"lines": handler},
        "loggers": {
            "setstream.serve": {"handlers": ["lines"], "level": level.upper(), "propagate": False},
            "uvicorn": quiet,
            "uvicorn.error": quiet | {"level": level.upper()},
            "uvicorn.access": quiet,
        },
    }
