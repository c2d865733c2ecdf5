"""Language models that read slots, segments or all words, between the pool and the classifier or instead of the pool.

    SlotReader       [CLS] z_1 ... z_K --language model without positions--> pooled [CLS], or the mean over the slots
    SegmentReader    [CLS] w_1 ... w_n [SEP] per segment --language model--> s_1 ... s_S --transformer--> mean (ToBERT)
    WholeReader      [CLS] all words [SEP] --Longformer--> pooled [CLS]

The last two need the whole document in order: they are wrapped in `ChunkMean`, with each document as one chunk.
"""

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from setstream.errors import ConfigurationError
from setstream.tasks.documents.language import Language, Longformer, framed, full_mask

POOLS = ("cls", "mean")


class SlotReader(nn.Module):
    """Slots (B, K, width) after the word vector of [CLS]; pooled at [CLS] or by the mean over the slots."""

    def __init__(self, language: Language, first: Tensor, pool: str = "cls") -> None:
        super().__init__()
        if pool not in POOLS:
            raise ConfigurationError(f"unknown pool {pool!r} of the language model: choose one of {', '.join(POOLS)}")
        self.language, self.pool = language, pool
        self.first = nn.Parameter(first.clone())

    def forward(self, z: Tensor) -> Tensor:
        outputs, pooled = self.language(torch.cat([self.first.expand(len(z), 1, -1), z], 1))
        return pooled if self.pool == "cls" else outputs[:, 1:].mean(1)


class SegmentReader(nn.Module):
    """ToBERT (Pappagari et al. 2019): segments through BERT, a transformer over their vectors, the mean."""

    def __init__(self, language: Language, first: Tensor, last: Tensor, segment: int, layers: int, heads: int) -> None:
        super().__init__()
        most = math.inf if language.longest is None else language.longest - 2
        if not 1 <= segment <= most:
            raise ConfigurationError(f"segment must be 1 to {most} words for this model; got {segment}")
        self.language, self.segment = language, segment
        self.first, self.last = nn.Parameter(first.clone()), nn.Parameter(last.clone())
        width = language.out_width
        layer = nn.TransformerEncoderLayer(width, heads, 4 * width, 0.1, "gelu", batch_first=True, norm_first=True)
        self.over = nn.TransformerEncoder(layer, layers, nn.LayerNorm(width), enable_nested_tensor=False)

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        """(B, out_width) of words (B, n, width), real ones first."""
        mask = full_mask(x) if mask is None else mask
        batch, size = x.shape[:2]
        count = math.ceil(size / self.segment)
        padding = count * self.segment - size
        real_words = F.pad(mask, (0, padding)).unflatten(1, (count, self.segment))  # (B, S, segment)
        words = F.pad(x, (0, 0, 0, padding)).unflatten(1, (count, self.segment))
        seen = real_words.any(2)  # (B, S): segments with a word; the others are not read
        longest = int(real_words[seen].sum(1).max())
        rows, real = framed(words[seen][:, :longest], real_words[seen][:, :longest], self.first, self.last)
        vectors = x.new_zeros(batch, count, self.language.out_width)
        vectors = vectors.masked_scatter(seen.unsqueeze(-1), self.language(rows, real)[1].to(vectors.dtype))
        width = vectors.shape[-1]
        angles = torch.arange(count)[:, None] * torch.exp(torch.arange(0, width, 2) * (-math.log(10_000.0) / width))
        positions = torch.stack([angles.sin(), angles.cos()], -1).flatten(1)[:, :width]  # sinusoidal: (S, out_width)
        read = self.over(vectors + positions.to(x), src_key_padding_mask=~seen)
        weight = (seen / seen.sum(1, keepdim=True)).unsqueeze(-1)
        return (read * weight.to(read.dtype)).sum(1)


class WholeReader(nn.Module):
    """All words of a document through a Longformer."""

    def __init__(self, language: Longformer, first: Tensor, last: Tensor) -> None:
        super().__init__()
        self.language = language
        self.first, self.last = nn.Parameter(first.clone()), nn.Parameter(last.clone())

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        """(B, out_width) of words (B, n, width), real ones first."""
        return self.language(*framed(x, full_mask(x) if mask is None else mask, self.first, self.last))[1]
