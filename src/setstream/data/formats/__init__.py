"""File formats, a module for each. To add one: write its module, and add its class to `SOURCES` or `TABLES`.

    SOURCES     one set per file: a `FileSource` that opens the file as an array (N, ...)
    TABLES      many sets per file, one row per element: a `TableFile` that gives record batches

A class lists the endings of its files in `suffixes`.
"""

from setstream.data.formats.arrow import ArrowFile
from setstream.data.formats.file import FileSource, check_stored, reading
from setstream.data.formats.hdf5 import H5Source, h5_array, read_h5
from setstream.data.formats.images import ImageFolderSource, read_image
from setstream.data.formats.npy import NpySource
from setstream.data.formats.parquet import ParquetTable
from setstream.data.formats.table import TableFile
from setstream.data.formats.torch import TorchSource
from setstream.data.formats.zarr import ZarrSource

SOURCES: tuple[type[FileSource], ...] = (NpySource, H5Source, TorchSource, ZarrSource)
TABLES: tuple[type[TableFile], ...] = (ParquetTable, ArrowFile)

#: By ending.
SOURCE_OF: dict[str, type[FileSource]] = {suffix: source for source in SOURCES for suffix in source.suffixes}
TABLE_OF: dict[str, type[TableFile]] = {suffix: table for table in TABLES for suffix in table.suffixes}

__all__ = [
    "SOURCES",
    "SOURCE_OF",
    "TABLES",
    "TABLE_OF",
    "FileSource",
    "H5Source",
    "ImageFolderSource",
    "NpySource",
    "ParquetTable",
    "TableFile",
    "TorchSource",
    "ZarrSource",
    "check_stored",
    "h5_array",
    "read_h5",
    "read_image",
    "reading",
]
