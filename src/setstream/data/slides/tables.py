"""The scores of a slide's patches as files: a table, or one square per patch for QuPath.

    .csv, .parquet   columns x, y (level 0) and one for each score, a row per patch
    .geojson         a tile per patch, with its scores as measurements

They are written in blocks, so memory does not depend on the number of patches.
"""

import csv
import json
from collections.abc import Iterator, Mapping
from pathlib import Path

import numpy as np

from setstream._utils.atomic import whole_or_nothing
from setstream._utils.optional import need
from setstream.data.slides.grid import Grid
from setstream.errors import ConfigurationError, ShapeError

BLOCK = 2**14  #: patches at a time
TABLES = (".csv", ".parquet", ".geojson")
Columns = Mapping[str, np.ndarray]


def write_scores(path: Path, grid: Grid, scores: Columns) -> None:
    """Write the places of patches and their scores, each (N,), as the ending of the path says; a file is complete or absent."""
    if wrong := {name: np.shape(values) for name, values in scores.items() if np.shape(values) != (len(grid),)}:
        raise ShapeError(f"{grid.name} has {len(grid)} patches and needs a value for each; got {wrong}")
    if path.suffix not in TABLES:
        raise ConfigurationError(f"scores are written as {', '.join(TABLES)}; got {path.name}")
    columns = {"x": grid.coords[:, 0], "y": grid.coords[:, 1], **scores}
    with whole_or_nothing(path) as hidden:
        {".csv": _csv, ".parquet": _parquet, ".geojson": _geojson}[path.suffix](hidden, grid, columns)


def _blocks(columns: Columns) -> Iterator[dict[str, np.ndarray]]:
    for start in range(0, len(columns["x"]), BLOCK):
        yield {name: values[start : start + BLOCK] for name, values in columns.items()}


def _csv(path: Path, grid: Grid, columns: Columns) -> None:
    with path.open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(columns)
        for block in _blocks(columns):
            writer.writerows(zip(*(values.tolist() for values in block.values()), strict=True))


def _parquet(path: Path, grid: Grid, columns: Columns) -> None:
    arrow, parquet = need("pyarrow"), need("pyarrow.parquet")
    schema = arrow.schema([(name, arrow.from_numpy_dtype(values.dtype)) for name, values in columns.items()])
    with parquet.ParquetWriter(path, schema) as file:
        for block in _blocks(columns):
            file.write_table(arrow.table(block, schema=schema))


def _geojson(path: Path, grid: Grid, columns: Columns) -> None:
    side, names = grid.patch_size_level0, [json.dumps(name) for name in columns if name not in ("x", "y")]
    values = ",".join(f"{name}:%.6g" for name in names)
    feature = (
        '{"type":"Feature","geometry":{"type":"Polygon","coordinates":[[[%d,%d],[%d,%d],[%d,%d],[%d,%d],[%d,%d]]]},'
        f'"properties":{{"objectType":"tile","measurements":{{{values}}}}}}}'
    )
    with path.open("w") as file:
        file.write('{"type":"FeatureCollection","features":[')
        before = "\n"
        for block in _blocks(columns):
            for x, y, *scores in zip(*(column.tolist() for column in block.values()), strict=True):
                right, bottom = x + side, y + side
                file.write(before + feature % (x, y, right, y, right, bottom, x, bottom, x, y, *scores))
                before = ",\n"
        file.write("\n]}\n")
