"""The front page: the files of the folder `playground/pages`, read once, served from memory.

`/` is index.html, `/playground/NAME` every other file. Only what lies in the folder at the start can be asked for, so no
path leads anywhere else. The door's Content-Security-Policy lets a page load from this server only.
"""

import mimetypes
from pathlib import Path

from fastapi import FastAPI, Response

FOLDER = Path(__file__).parent / "playground" / "pages"


def add_pages(api: FastAPI, folder: Path = FOLDER) -> frozenset[str]:
    """Serve the files of a folder; gives their paths."""
    paths = set()
    for file in sorted(folder.iterdir()):
        if file.is_file():
            path = "/" if file.name == "index.html" else f"/playground/{file.name}"
            _add_page(api, path, file.read_bytes(), mimetypes.guess_type(file.name)[0] or "application/octet-stream")
            paths.add(path)
    return frozenset(paths)


def _add_page(api: FastAPI, path: str, content: bytes, kind: str) -> None:
    @api.get(path, include_in_schema=False)
    async def page() -> Response:
        return Response(content, media_type=kind)
