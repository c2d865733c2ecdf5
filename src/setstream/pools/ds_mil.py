"""DS-MIL as a pool that reads a set twice: the critical element of each class first, attention to it second::

    s_cj = w_c · h_j + b_c,   m_c = argmax_j s_cj            pass 1; h_j (D,) features
    a_cj = softmax_j(q(h_j) · q(h_(m_c)) / √hidden)          pass 2; q: a network
    instance logit  s_(c, m_c)          bag logit  u_c · V Σ_j a_cj h_j + u_c · v + t_c          V, v: the value layer

V is linear and the weights of a class sum to one, so V is applied once, to the mean. An empty set has the logits 0 and t_c.
Elements with equal scores are compared by their features, so the critical one does not depend on order or chunks (see
`states/accumulators/maximum_by.py`).

Li et al., "Dual-stream Multiple Instance Learning Network for Whole Slide Image Classification with Self-supervised Contrastive
Learning", CVPR 2021.
"""

from typing import Any
from typing import cast as typed

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from setstream.errors import ConfigurationError
from setstream.pools.base import Context, Pool, given_slots
from setstream.pools.gated_attention import rename_hook
from setstream.pools.keyed_attention import KeyedAttention
from setstream.pools.multi_pass import MultiPass
from setstream.states.accumulators import Accumulator, MaximumBy, accumulator_dtype
from setstream.states.state import State


class CriticalElements(Pool):
    """The features of the element with the largest score of each class: (B, N, in_dim) to (B, num_classes, in_dim)."""

    def __init__(self, in_dim: int, num_classes: int) -> None:
        super().__init__()
        self.in_dim, self.num_classes = in_dim, num_classes
        self.score = nn.Linear(in_dim, num_classes)

    def empty_accumulators(self, batch: int, device: torch.device, width: int | None = None) -> dict[str, Accumulator]:
        score = torch.full((batch, self.num_classes), float("-inf"), device=device)
        return {"critical": MaximumBy(score=score, features=score.new_zeros(*score.shape, self.in_dim or 1))}

    def accumulate(self, context: Context, features: Tensor, mask: Tensor | None) -> dict[str, Accumulator]:
        features = features.to(torch.promote_types(features.dtype, torch.float32))
        # In a wider type than they are compared in: rounding, which may differ between chunks, does not decide a tie.
        wide = accumulator_dtype(features.device)
        with torch.no_grad(), torch.autocast(features.device.type, enabled=False):
            scores = F.linear(features.to(wide), self.score.weight.to(wide), self.score.bias.to(wide)).to(features.dtype)
            scores = scores.nan_to_num(nan=torch.finfo(scores.dtype).max)  # only an empty set has -∞
            scores = scores if mask is None else scores.masked_fill(~mask.unsqueeze(-1), float("-inf"))
        return {"critical": MaximumBy.of(scores, features)}

    def finalize(self, state: State) -> Tensor:
        return state.accumulators["critical"]["features"]


class CriticalAttention(KeyedAttention):
    """Attention of the critical elements, which an earlier pass gives, to all elements."""

    takes_slots = True

    def __init__(self, in_dim: int, hidden: int, num_classes: int) -> None:
        super().__init__(in_dim, hidden, num_classes)
        self.query = nn.Sequential(nn.Linear(in_dim, hidden), nn.ReLU(), nn.Linear(hidden, hidden), nn.Tanh())

    def keys(self, features: Tensor) -> Tensor:
        return typed(Tensor, self.query(features))

    def queries(self, state: State) -> Tensor:
        critical = given_slots(state)
        if critical is None:
            raise ConfigurationError("CriticalAttention is a later pass, which needs the elements that an earlier one found")
        return self.keys(critical) * self.hidden**-0.5


class DSMIL(MultiPass):
    """DS-MIL: (B, N, in_dim) to the logits of both streams, {"instance": (B, num_classes), "bag": (B, num_classes)}.

    `value=False` leaves out the value layer. `attention` of the second pass gives the weights (B, 1, num_classes, n). Unlike
    `ss.nn.DSMIL`, whose weights it loads, it reads sets in chunks of any size.

    >>> import torch, setstream as ss
    >>> pool, module = ss.DSMIL(16, num_classes=2), ss.nn.DSMIL(16, num_classes=2)
    >>> pool.load_state_dict(module.state_dict())
    <All keys matched successfully>
    >>> x = torch.randn(3, 100, 16)
    >>> streams = pool(x)
    >>> torch.allclose((streams["instance"] + streams["bag"]) / 2, module(x), atol=1e-5)
    True
    """

    def __init__(self, in_dim: int, num_classes: int = 1, hidden: int = 128, value: bool = True) -> None:
        attention = CriticalAttention(in_dim, hidden, num_classes)
        super().__init__([CriticalElements(in_dim, num_classes), attention], nn.Identity())
        self.value = nn.Linear(in_dim, in_dim) if value else nn.Identity()
        self.bag = nn.Parameter(nn.init.xavier_uniform_(torch.empty(num_classes, in_dim)))
        self.bag_bias = nn.Parameter(torch.zeros(num_classes))
        self.register_load_state_dict_pre_hook(rename_hook)

    @property
    def score(self) -> nn.Linear:
        """The layer of the instance stream: features to the scores of all classes."""
        return typed(CriticalElements, self.pool(1)).score

    def finalize(self, state: State) -> dict[str, Tensor]:
        pooled: Tensor = super().finalize(state)
        critical = typed(Tensor, given_slots(state.select(f"pass{self.passes}")))
        dtype = torch.promote_types(self.bag.dtype, torch.float32)
        with torch.autocast(state.device.type, enabled=False):
            values = pooled.to(dtype)
            if isinstance(self.value, nn.Linear):
                values = F.linear(values, self.value.weight.to(dtype), self.value.bias.to(dtype))
            instance = (critical.to(dtype) * self.score.weight.to(dtype)).sum(-1) + self.score.bias.to(dtype)
            bag = (values * self.bag.to(dtype)).sum(-1)
            empty = (state.count == 0).unsqueeze(1)
            return {"instance": instance.masked_fill(empty, 0.0), "bag": bag.masked_fill(empty, 0.0) + self.bag_bias.to(dtype)}

    @staticmethod
    def rename_weights(weights: dict[str, Any], prefix: str) -> None:
        """Weights of `ss.nn.DSMIL`, alone or in the model `ds-mil` of 0.1, load into this pool."""
        for key in [key for key in weights if key.startswith(prefix)]:
            name = key.removeprefix(prefix).removeprefix("module.").removeprefix("dsmil.")
            for old, new in {"instance.": "pools.0.score.", "query.": "pools.1.query."}.items():
                name = new + name.removeprefix(old) if name.startswith(old) else name
            weights[prefix + name] = weights.pop(key)

    def extra_repr(self) -> str:
        return f"{self.in_dim}, num_classes={len(self.bag)}"
