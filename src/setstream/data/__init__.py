"""Where sets come from: memory, numpy, HDF5, torch, Parquet, Arrow, Zarr, folders of images."""

from setstream.data.dataset import SetBatch, SetDataset, SetLoader
from setstream.data.files import H5Source, ImageFolderSource, NpySource, TorchSource, ZarrSource
from setstream.data.parquet import ParquetSets, ParquetSource
from setstream.data.recognise import open_sets as open
from setstream.data.recognise import open_source
from setstream.sets.chunks import SourceChunks
from setstream.sets.part import PartSource
from setstream.sets.source import ArraySource, SetSource

__all__ = [
    "ArraySource",
    "H5Source",
    "ImageFolderSource",
    "NpySource",
    "ParquetSets",
    "ParquetSource",
    "PartSource",
    "SetBatch",
    "SetDataset",
    "SetLoader",
    "SetSource",
    "SourceChunks",
    "TorchSource",
    "ZarrSource",
    "open",
    "open_source",
]
