"""A Longformer from a BERT: the same weights; each word attends to those near it, and [CLS] to all.

    query_global, key_global, value_global = query, key, value          position p = position p mod P of the BERT

Longformers are commonly initialised like this (Beltagy et al. 2020). For documents of up to half a window the output equals
BERT's. Positions repeat, so documents are not truncated.
"""

from typing import Any

import torch
from torch import Tensor

from setstream.errors import ConfigurationError
from setstream.tasks.documents.language import Language, transformers

KEPT = (
    *("vocab_size", "type_vocab_size", "max_position_embeddings", "pad_token_id"),
    *("hidden_size", "num_hidden_layers", "num_attention_heads", "intermediate_size", "hidden_act"),
    *("hidden_dropout_prob", "attention_probs_dropout_prob", "layer_norm_eps"),
)


def converted(bert: Any, window: int) -> Any:
    """A LongformerModel with the weights of a BertModel; a word sees window / 2 words to each side."""
    if bert.config.model_type != "bert":
        raise ConfigurationError(f"a Longformer can be made from a BERT only; got a {bert.config.model_type}")
    if window < 2 or window % 2:
        raise ConfigurationError(f"window must be even and at least 2; got {window}")
    library = transformers()
    config = library.LongformerConfig(**{name: getattr(bert.config, name) for name in KEPT}, attention_window=window)
    model = library.LongformerModel(config)
    weights = bert.state_dict()
    weights |= {
        name.replace(f".{part}.", f".{part}_global."): value
        for name, value in weights.items()
        for part in ("query", "key", "value")
        if f"attention.self.{part}." in name
    }
    missing, unexpected = model.load_state_dict(weights, strict=False)
    if missing or [name for name in unexpected if not name.endswith("_ids")]:
        raise ConfigurationError(f"this BERT cannot become a Longformer: it lacks {missing[:5]} and has extra {unexpected[:5]}")
    # Position 0 is not padding here: it is learned like the others.
    model.embeddings.position_embeddings.padding_idx = None
    return model


class Longformer(Language):
    """A Longformer from a BERT: word vectors in order to outputs and the pooled output of [CLS]."""

    def __init__(self, bert: Any, window: int = 256) -> None:
        super().__init__(converted(bert, window))

    def forward(self, x: Tensor, mask: Tensor | None = None, **options: Any) -> tuple[Tensor, Tensor]:
        """[CLS] attends to all, and all to it; other words to their neighbours."""
        table = self.model.config.max_position_embeddings
        positions = (torch.arange(x.shape[1], device=x.device) % table).expand(x.shape[:2])
        global_attention = torch.zeros(x.shape[:2], dtype=torch.long, device=x.device)
        global_attention[:, 0] = 1
        return super().forward(x, mask, position_ids=positions, global_attention_mask=global_attention, **options)
