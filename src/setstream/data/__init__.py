"""Sources of sets: memory, numpy, HDF5, torch, Parquet, Arrow, Zarr, folders of images, whole-slide images.

open(path)          recognises the format and returns a `SetDataset`: one `SetSource` per set
formats/            a module for each file format
SetCollection       many sets, for bulk encoding: a `SetDataset`, or the tables of `ParquetSets`
slides/             patches of whole-slide images
"""

from setstream.data.collection import SetCollection
from setstream.data.dataset import SetBatch, SetDataset, SetLoader
from setstream.data.formats import H5Source, ImageFolderSource, NpySource, TorchSource, ZarrSource
from setstream.data.recognise import open_collection, open_source
from setstream.data.recognise import open_sets as open
from setstream.data.table_sets import ParquetSets, ParquetSource
from setstream.sets.chunks import SourceChunks
from setstream.sets.joined import JoinedSource
from setstream.sets.source import ArraySource, PartSource, SetSource

__all__ = [
    "ArraySource", "H5Source", "ImageFolderSource", "JoinedSource", "NpySource", "ParquetSets", "ParquetSource", "PartSource",
    "SetBatch",
    "SetCollection", "SetDataset", "SetLoader", "SetSource", "SourceChunks", "TorchSource", "ZarrSource", "open",
    "open_collection", "open_source",
]  # fmt: skip
