"""The front page: the files of the folder `playground/pages`, read once, served from memory.

`/` is index.html, `/playground/NAME` every other file. Only files that are in the folder at the start can be
requested. The Content-Security-Policy lets a page load from this server only.
"""

import mimetypes
from pathlib import Path

from fastapi import FastAPI, Response

FOLDER = Path(__file__).parent / "playground" / "pages"


def add_pages(api: FastAPI) -> frozenset[str]:
    """Serve the files of the folder; returns their paths."""
    files = [file for file in FOLDER.iterdir() if file.is_file()]
    return frozenset(_add_page(api, "/" if file.name == "index.html" else f"/playground/{file.name}", file) for file in files)


def _add_page(api: FastAPI, path: str, file: Path) -> str:
    content, kind = file.read_bytes(), mimetypes.guess_type(file.name)[0] or "application/octet-stream"

    @api.get(path, include_in_schema=False)
    async def page() -> Response:
        return Response(content, media_type=kind)

    return path
