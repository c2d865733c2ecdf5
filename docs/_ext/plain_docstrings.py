"""Docstrings in plain voice, as reStructuredText.

The library's docstrings are written to be read as they stand: formulas and tables are set by indentation, options are lines
`name:   what it is`, names stand in single backticks. reStructuredText would run such lines together, and warn. So each block
between empty lines is taken for what it is:

    >>> ...                    a doctest            stays
    name:  text                options              a definition list
    - text, or 1. text         a list               stays
    indented, or aligned       a formula, a table   a literal block, as it stands
    anything else              a paragraph          `names` become references, other marks lose their meaning
"""

from __future__ import annotations

import re
from itertools import groupby
from typing import Any

OPTION = re.compile(r"([a-z_][\w.]*(?:, [a-z_][\w.]*)*):\s+(\S.*)")  # a class's name begins a sentence: "UMBC: slots attend"
LISTED = re.compile(r"(?:[-*]|\d+\.)\s")
ALIGNED = re.compile(r"\S {2,}\S")
NAME = re.compile(r"[A-Za-z_][\w.]*(?:\(\))?")


def prose(text: str) -> str:
    """A line of prose: `names` become references, other code is literal, and stars, bars and underscores are themselves."""
    parts = re.split(r"``?([^`]+)``?", text)
    done = []
    for number, part in enumerate(parts):
        if not number % 2:
            done.append(re.sub(r"([*|\\]|(?<=\w)_(?=\W|$))", r"\\\1", part))
        elif NAME.fullmatch(part):
            target = re.sub(r"^ss\.", "setstream.", part)
            done.append(f":py:obj:`{part} <{target.removesuffix('()')}>`")
        else:
            done.append(f"``{part}``")
        if number % 2 and number + 1 < len(parts) and re.match(r"\w", parts[number + 1]):
            done.append("\\ ")  # `name`s: the closing mark must not touch a letter
    return "".join(done)


def options(lines: list[str]) -> list[str]:
    """`name:  text`, with indented lines that go on, as a definition list."""
    done = []
    for line in lines:
        match = OPTION.fullmatch(line)
        if match:
            done += [f"{', '.join(f'``{name}``' for name in match[1].split(', '))}", f"   {prose(match[2])}"]
        else:
            done.append(f"   {prose(line.strip())}")
    return done


def block(lines: list[str]) -> list[str]:
    """One block of a docstring, between empty lines."""
    first = lines[0]
    if first.startswith((">>>", "..")) or LISTED.match(first):
        return lines if first.startswith((">>>", "..")) else [prose(line) for line in lines]
    if OPTION.fullmatch(first) and all(OPTION.fullmatch(line) or line.startswith("  ") for line in lines):
        return options(lines)
    if first.startswith("  ") or sum(bool(ALIGNED.search(line)) for line in lines) * 2 > len(lines):
        return ["::", "", *(f"   {line}" for line in lines)]
    return [prose(line) for line in lines]


def rest(lines: list[str]) -> list[str]:
    """A docstring as reStructuredText."""
    done: list[str] = []
    for empty, group in groupby(lines, key=lambda line: not line.strip()):
        done += [""] if empty else block(list(group))
    return done


def process(app: Any, what: str, name: str, obj: Any, settings: Any, lines: list[str]) -> None:
    """Sphinx's hook: change the lines in place."""
    module = getattr(obj, "__module__", None) or name
    if str(module).startswith("setstream"):
        lines[:] = [*rest(lines), ""]


def skip(app: Any, what: str, name: str, obj: Any, skipped: bool, settings: Any) -> bool | None:
    """Sphinx's hook: leave out what scikit-learn adds to every estimator; its own pages explain it."""
    return True if name.startswith("set_") and name.endswith("_request") else None


def setup(app: Any) -> dict[str, Any]:
    """Sphinx's entry."""
    app.connect("autodoc-process-docstring", process)
    app.connect("autodoc-skip-member", skip)
    return {"version": "1", "parallel_read_safe": True, "env_version": 1}
