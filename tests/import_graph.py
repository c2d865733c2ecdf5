"""Imports between the folders of src/setstream: `python -m tests.import_graph` checks them and draws docs/images/imports.svg.

It fails if a folder imports one that stands below it, if modules import each other in a circle, or if a function imports a
module of setstream (functions import optional libraries only, through `setstream._utils.optional.need`).
"""

import ast
import sys
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

ROOT = Path(__file__).parents[1]
SOURCE = ROOT / "src" / "setstream"
PICTURE = ROOT / "docs" / "images" / "imports.svg"

#: The folders in the order in which they build on each other: each imports itself and those before it, nothing else.
FOLDERS = (
    "errors", "_utils", "states", "sets", "pools", "models", "gradients", "testing", "nn", "stores", "data", "bulk", "training",
    "report", "tasks", "integrations", "serve", "cli",
)  # fmt: skip


def folder_of(module):
    """The folder of a module; None for the package itself."""
    return module.split(".")[1] if "." in module else None


def modules():
    """Every module with its file."""
    found = {}
    for path in sorted(SOURCE.rglob("*.py")):
        parts = ("setstream", *path.relative_to(SOURCE).with_suffix("").parts)
        found[".".join(parts).removesuffix(".__init__")] = path
    return found


def imported(node, known):
    """The modules of setstream that an import statement names."""
    if isinstance(node, ast.Import):
        names = [alias.name for alias in node.names]
    elif isinstance(node, ast.ImportFrom) and node.module:
        full = [f"{node.module}.{alias.name}" for alias in node.names]
        names = [name if name in known else node.module for name in full]
    else:
        names = []
    return {name for name in names if name.split(".")[0] == "setstream"}


def is_type_checking(node):
    return isinstance(node, ast.If) and isinstance(node.test, ast.Name) and node.test.id == "TYPE_CHECKING"


def imports_of(path, known):
    """Modules that a file imports when it is imported, and those that its functions import; for type checkers only: neither."""
    at_the_top, in_functions = set(), set()

    def visit(node, inside):
        target = in_functions if inside else at_the_top
        target |= imported(node, known)
        inside = inside or isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda)
        for child in node.orelse if is_type_checking(node) else ast.iter_child_nodes(node):
            visit(child, inside)

    visit(ast.parse(path.read_text()), False)
    return at_the_top, in_functions


def problems():
    """What is wrong, one line each."""
    known = modules()
    lines, graph = [], {}
    for module, path in known.items():
        at_the_top, in_functions = imports_of(path, known)
        graph[module] = at_the_top - {module}
        lines += [f"{module}: a function imports {name}" for name in sorted(in_functions)]
        if module != "setstream":
            order = FOLDERS.index(folder_of(module))
            below = (name for name in at_the_top | in_functions if "." in name and FOLDERS.index(folder_of(name)) > order)
            lines += [f"{module} imports {name}, which stands below it" for name in sorted(below)]
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        lines.append(f"modules import each other: {' -> '.join(error.args[1])}")
    return lines


def folder_graph():
    """The folders that each folder imports."""
    known = modules()
    graph = {folder: set() for folder in FOLDERS}
    for module, path in known.items():
        if module != "setstream":
            names = {folder_of(name) for name in imports_of(path, known)[0]}
            graph[folder_of(module)] |= names - {None, folder_of(module)}
    return graph


def without_indirect(graph):
    """The arrows that no longer way replaces: the same order, fewer lines."""
    reached = {}
    for folder in FOLDERS:
        reached[folder] = set().union(*(reached[other] | {other} for other in graph[folder]))
    return {folder: {o for o in graph[folder] if not any(o in reached[p] for p in graph[folder])} for folder in FOLDERS}


def draw():
    """The folders from top to bottom, an arc from each to those it builds on; indirect ones are left out."""
    row, width = 34, 330
    height = row * len(FOLDERS) + 20
    place = {folder: 20 + row * number for number, folder in enumerate(FOLDERS)}
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" height="{height}" '
        'font-family="sans-serif" font-size="14">',
        "<title>Folders of setstream: each imports those above it</title>",
        '<defs><marker id="tip" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="7" markerHeight="7" orient="auto">'
        '<path d="M0,0 L8,4 L0,8 z" fill="#678"/></marker></defs>',
        f'<rect width="{width}" height="{height}" fill="#fff"/>',
    ]
    for folder, others in without_indirect(folder_graph()).items():
        for other in sorted(others, key=FOLDERS.index):
            start, end = place[folder] + 9, place[other] + 17
            reach = 175 + 22 * (FOLDERS.index(folder) - FOLDERS.index(other)) ** 0.85 * 1.6
            lines.append(
                f'<path d="M150,{start} C{reach:.0f},{start} {reach:.0f},{end} 150,{end}" fill="none" stroke="#678" '
                'stroke-width="1.2" marker-end="url(#tip)"/>'
            )
    for folder, top in place.items():
        lines.append(f'<rect x="10" y="{top}" width="140" height="26" rx="5" fill="#eef3f8" stroke="#678"/>')
        lines.append(f'<text x="80" y="{top + 18}" text-anchor="middle">{folder}</text>')
    return "\n".join([*lines, "</svg>"]) + "\n"


if __name__ == "__main__":
    PICTURE.write_text(draw())
    print(PICTURE)
    sys.exit("\n".join(problems()) or None)
