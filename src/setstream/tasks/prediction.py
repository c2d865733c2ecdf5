"""The prediction of a model whose sets are given in chunks."""

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from setstream.models.model import SetModel
from setstream.pools.base import AVERAGE


@torch.no_grad()
def predict_in_chunks(model: SetModel, chunks: Iterable[Tensor]) -> Any:
    """The model's output after all chunks (B, n, ...) of its sets. Models that are not consistent average over the chunks."""
    stream = model.stream(chunks=AVERAGE)
    for chunk in chunks:
        stream.update(chunk)
    return stream.predict()
