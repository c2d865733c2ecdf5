"""File formats, a module for each. To add one, write its module and add its class, with `suffixes`, to a line below.

SOURCES     one set per file: a `FileSource` that opens the file as an array (N, ...)
TABLES      many sets per file, one row per element: a `TableFile` that reads record batches
"""

from setstream.data.formats.arrow import ArrowFile
from setstream.data.formats.file import FileSource
from setstream.data.formats.hdf5 import H5Source
from setstream.data.formats.images import ImageFolderSource
from setstream.data.formats.npy import NpySource
from setstream.data.formats.parquet import ParquetTable
from setstream.data.formats.table import TableFile
from setstream.data.formats.torch import TorchSource
from setstream.data.formats.zarr import ZarrSource

SOURCES: tuple[type[FileSource], ...] = (NpySource, H5Source, TorchSource, ZarrSource)
TABLES: tuple[type[TableFile], ...] = (ParquetTable, ArrowFile)

SOURCE_OF = {suffix: source for source in SOURCES for suffix in source.suffixes}
TABLE_OF = {suffix: table for table in TABLES for suffix in table.suffixes}

__all__ = ["SOURCE_OF", "TABLE_OF", "H5Source", "ImageFolderSource", "NpySource", "ParquetTable", "TorchSource", "ZarrSource"]
