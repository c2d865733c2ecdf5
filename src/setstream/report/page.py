"""One self-contained HTML page: text, tables and matplotlib's figures in a single file, without links to other files."""

import base64
import html
import io
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

from setstream._utils.optional import need

FRAME_MS, LAST_FRAME_MS = 160, 2500
STYLE = """
:root { color-scheme: light dark; --line: #8884; --dim: #777; }
body { font: 16px/1.5 system-ui, sans-serif; max-width: 62rem; margin: 2rem auto; padding: 0 1rem; }
table { border-collapse: collapse; margin: 1rem 0; font-variant-numeric: tabular-nums; display: block; overflow-x: auto; }
th, td { text-align: left; padding: .25rem .8rem .25rem 0; border-bottom: 1px solid var(--line); }
caption, .note { color: var(--dim); text-align: left; }
img { max-width: 100%; background: white; }
code { background: #8882; padding: 0 .25em; }
"""


class Page:
    """A report that grows section by section.

    >>> page = Page("Numbers")
    >>> page.section("Primes")
    >>> page.table(["n", "prime"], [["2", "yes"], ["4", "no"]])
    >>> "<td>yes</td>" in page.html()
    True
    """

    def __init__(self, title: str) -> None:
        self.title = title
        self.parts: list[str] = []
        self.pictures: list[tuple[str, bytes]] = []  # name of a file, content

    def section(self, title: str) -> None:
        self.parts.append(f"<h2>{html.escape(title)}</h2>")

    def text(self, text: str) -> None:
        self.parts.append(f"<p>{html.escape(text)}</p>")

    def code(self, text: str) -> None:
        self.parts.append(f"<pre><code>{html.escape(text)}</code></pre>")

    def table(self, columns: list[str], rows: list[list[str]], note: str = "") -> None:
        head = "".join(f"<th>{html.escape(column)}</th>" for column in columns)
        body = "".join("<tr>" + "".join(f"<td>{html.escape(cell)}</td>" for cell in row) + "</tr>" for row in rows)
        self.parts.append(f"<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>")
        if note:
            self.parts.append(f'<p class="note">{html.escape(note)}</p>')

    def figure(self, figure: Any, about: str) -> None:
        buffer = io.BytesIO()
        figure.savefig(buffer, format="png", dpi=110)
        self.picture(buffer.getvalue(), "png", about)

    def picture(self, content: bytes, kind: str, about: str) -> None:
        """A picture (png or gif) with its caption."""
        words = re.sub(r"[^a-z0-9]+", "-", about.lower()).strip("-")
        self.pictures.append((f"{len(self.pictures) + 1:02}-{words[:60]}.{kind}", content))
        data = base64.b64encode(content).decode()
        self.parts.append(f'<figure><img alt="{html.escape(about)}" src="data:image/{kind};base64,{data}">')
        self.parts.append(f'<figcaption class="note">{html.escape(about)}</figcaption></figure>')

    def html(self) -> str:
        title, body = html.escape(self.title), "\n".join(self.parts)
        head = f'<meta charset="utf-8"><meta name="viewport" content="width=device-width"><title>{title}</title>'
        head += f"<style>{STYLE}</style>"
        return f'<!doctype html><html lang="en"><head>{head}</head><body><h1>{title}</h1>{body}</body></html>'

    def write(self, path: Path, figures: Path | None = None) -> None:
        """Write the page to a file, and its pictures into a folder if one is given."""
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(self.html(), encoding="utf-8")
        if figures is not None:
            figures.mkdir(parents=True, exist_ok=True)
            for name, content in self.pictures:
                (figures / name).write_bytes(content)


def pyplot() -> Any:
    """The module matplotlib.pyplot."""
    need("matplotlib", "report", "figures").use("Agg")
    return need("matplotlib.pyplot", "report", "figures")


def animate(figure: Any, draw: Callable[[int], None], frames: int, colors: int = 48) -> bytes:
    """The GIF of draw(0), draw(1), ..., each of which changes the figure; the last frame stays longer."""
    image = need("PIL.Image", "report", "animations")
    pictures = []
    for frame in range(frames):
        draw(frame)
        buffer = io.BytesIO()
        figure.savefig(buffer, format="png", dpi=72)
        pictures.append(image.open(buffer).convert("P", palette=image.Palette.ADAPTIVE, colors=colors))
    pyplot().close(figure)
    out = io.BytesIO()
    durations = [FRAME_MS] * (frames - 1) + [LAST_FRAME_MS]
    pictures[0].save(out, format="GIF", save_all=True, append_images=pictures[1:], duration=durations, loop=0)
    return out.getvalue()
