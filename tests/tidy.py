"""Correct the ends of lines and of files, and refuse large files: `python tests/tidy.py FILE...`, used by pre-commit."""

import sys
from pathlib import Path

LARGEST = 2**20


def tidy(data: bytes) -> bytes:
    """Lines without trailing spaces, and one newline at the end."""
    lines = [line.rstrip() for line in data.splitlines()]
    return b"\n".join(lines).rstrip() + b"\n" if any(lines) else b""


def main(arguments: list[str]) -> int:
    """Give 1 if a file was changed or is too large."""
    files = [Path(name) for name in arguments if not name.startswith("--")]
    code = 0
    for file in files:
        data = file.read_bytes()
        if len(data) > LARGEST:
            print(f"{file}: {len(data):,} bytes; at most {LARGEST:,}")
            code = 1
        elif "--only-size" not in arguments and data != tidy(data):
            file.write_bytes(tidy(data))
            print(f"{file}: corrected")
            code = 1
    return code


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
