"""UMBC: slots attend to the elements of a set, through sums that are the same for every partition::

    Q = LN(S Wq)                         (K, d)      S (K, slot_dim) slots, LN optional, d = out_dim
    l = Q (Φ Wk + bk)ᵀ / √(d/H)          (K, N)      per head; Φ (N, in_dim) features
    A = activation(l)                    (K, N)      strictly positive
    z = A (Φ Wv + bv) / A 1_N            (K, d)      the division only where the activation normalises over the set

Willette et al., "Scalable Set Encoding with Universal Mini-Batch Consistency and Unbiased Full Set Gradient
Approximation", ICML 2023, eq. 3-6. Numerator A·(...) and normaliser A·1 are sums over elements: they are the state.

The projections fold. Q (Φ Wk)ᵀ = (Q Wkᵀ) Φᵀ and A (Φ Wv) = (A Φ) Wv, so with few slots the elements are never projected: Wk
goes into the queries once per pass, and Wv is applied to the K pooled rows once per set. Multiply-adds per element::

    folded   2 H K in_dim                direct   2 in_dim d + 2 K d

The cheaper one is chosen when the pool is built. bk shifts all logits of a slot by a constant, which leaves a softmax the same
(it has no bk); bv is added once where the weights sum to one, and times the weight where they do not. An empty set gives zeros.
"""

from contextlib import AbstractContextManager, nullcontext
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from setstream.errors import ConfigurationError, ShapeError
from setstream.pools.activations import ACTIVATIONS, Activation, resolve
from setstream.pools.base import Context, Cotangents, Pool, Want, given_slots
from setstream.pools.kernels.block_sums import fused_means, fuses, log_weights
from setstream.pools.kernels.shared_rows import pull_back, shared_rows
from setstream.pools.kernels.weighted_sums import weighted_sums
from setstream.pools.slots import Slots
from setstream.states.accumulators import Accumulator, LogSums, Shared
from setstream.states.state import State


def folding_pays(in_dim: int, num_slots: int, out_dim: int, heads: int) -> bool:
    """Whether pooling raw features takes fewer multiply-adds per element than projecting each element first.

    >>> folding_pays(128, num_slots=4, out_dim=128, heads=4), folding_pays(128, num_slots=64, out_dim=128, heads=4)
    (True, False)
    """
    return 2 * heads * num_slots * in_dim <= 2 * in_dim * out_dim + 2 * num_slots * out_dim


class UMBC(Pool):
    """Universally mini-batch consistent pooling: (B, N, in_dim) to (B, num_slots, out_dim).

    Args:
        slot_dim, out_dim: in_dim unless given.
        heads: divides out_dim.
        activation: softmax, sigmoid, slot-softmax, slot-sigmoid, slot-exp, or an `ss.Activation`.
        slots: learned, gaussian, shared-gaussian, or given by an earlier pass (see `pools/slots.py`).
        normalise: divide by the weights' sum over the set; None: the activation's default.
        eval_slots: mean or fixed.
        slot_norm: layer norm on the queries, as in the paper.
        query_bias: a bias of the slots' projection.
        shared_draw: in training, all sets of a batch get the same draw of Gaussian slots.
        slot_residual: add the queries to the pooled values, z = Q + A V.
        norm_after: layer norm on the result.
        slot_dropout: in training, each slot of each set is zeroed with this probability, the others scaled up.
        bias: biases of keys and values.
        fold: force folded (True) or direct (False) projections; None: whichever is cheaper.

    >>> import torch, setstream as ss
    >>> pool = ss.UMBC(in_dim=32, num_slots=4, slot_dim=16, out_dim=64, heads=4, slots="gaussian")
    >>> pool(torch.randn(2, 1000, 32)).shape
    torch.Size([2, 4, 64])
    """

    takes_slots = True

    def __init__(
        self,
        in_dim: int,
        num_slots: int,
        slot_dim: int | None = None,
        out_dim: int | None = None,
        heads: int = 1,
        *,
        activation: str | Activation = "softmax",
        slots: str = "learned",
        normalise: bool | None = None,
        eval_slots: str = "mean",
        slot_norm: bool = True,
        query_bias: bool = False,
        shared_draw: bool = False,
        slot_residual: bool = False,
        norm_after: bool = False,
        slot_dropout: float = 0.0,
        bias: bool = True,
        fold: bool | None = None,
    ) -> None:
        super().__init__()
        slot_dim = in_dim if slot_dim is None else slot_dim
        out_dim = in_dim if out_dim is None else out_dim
        sizes = {"in_dim": in_dim, "num_slots": num_slots, "slot_dim": slot_dim, "out_dim": out_dim, "heads": heads}
        for name, value in sizes.items():
            if value < 1:
                raise ConfigurationError(f"{name} must be at least 1; got {value}")
        if out_dim % heads:
            raise ConfigurationError(f"heads must divide out_dim; got out_dim = {out_dim} and heads = {heads}")
        if not 0.0 <= slot_dropout < 1.0:
            raise ConfigurationError(f"slot_dropout is a probability below 1; got {slot_dropout}")
        self.in_dim, self.num_slots, self.slot_dim = in_dim, num_slots, slot_dim
        self.out_dim, self.heads = out_dim, heads
        self.activation = resolve(activation, normalise)
        self.slot_residual, self.slot_dropout, self.shared_draw = slot_residual, slot_dropout, shared_draw
        self.folded = folding_pays(in_dim, num_slots, out_dim, heads) if fold is None else fold
        self.slots = Slots(slots, num_slots, slot_dim, eval_slots)
        self.query = nn.Linear(slot_dim, out_dim, bias=query_bias)
        self.query_norm = nn.LayerNorm(out_dim) if slot_norm else nn.Identity()
        self.key = nn.Linear(in_dim, out_dim, bias=bias and self.activation != ACTIVATIONS["softmax"])
        self.value = nn.Linear(in_dim, out_dim, bias=bias)
        self.norm = nn.LayerNorm(out_dim) if norm_after else nn.Identity()

    @property
    def width(self) -> int:
        """The most numbers that are computed from one element: its features and logits, or its keys and values."""
        return max(self.heads * self.num_slots, self.key.in_features if self.folded else 2 * self.out_dim)

    @property
    def sums_only(self) -> bool:
        return True  # 0 · ∞ and ∞ - ∞ are NaN

    @property
    def cuts_blocks(self) -> bool:
        return type(self).accumulate is UMBC.accumulate

    def configuration(self) -> dict[str, Any]:
        activation = self.activation
        return {
            "heads": self.heads,
            "activation": [activation.name, activation.log, activation.normalise],
            "slots": self.slots.kind,
            "slot_residual": self.slot_residual,
            "folded": self.folded,
        }

    # -- the state ----------------------------------------------------------------------------------------------------

    def empty_accumulators(self, batch: int, device: torch.device, width: int | None = None) -> dict[str, Accumulator]:
        pooled = self.key.in_features if self.folded else self.out_dim // self.heads
        slots = (batch, self.heads, self.num_slots)
        return {"pooled": LogSums.nothing((*slots, pooled), slots, device)}

    def draw_accumulators(self, batch: int, device: torch.device, generator: torch.Generator | None) -> dict[str, Accumulator]:
        noise = self.slots.draw(1 if self.shared_draw else batch, device, generator)
        return {} if noise is None else {"draw": Shared(noise=noise.expand(batch, -1, -1))}

    # -- a pass -------------------------------------------------------------------------------------------------------

    def prepare(self, state: State) -> Context:
        """The scaled queries (B or 1, G, R, E), with Wk inside if folded; what bk adds to the logits; Q where it is added."""
        with self._no_autocast():
            slots = self._queries(state)
            queries = self._split(slots * (self.out_dim // self.heads) ** -0.5)  # (B, H, K, d/H)
            context = {"slots": slots} if self.slot_residual else {}
            if self.key.bias is not None:
                bias = self.key.bias.to(queries.dtype).view(self.heads, -1, 1)
                context["offset"] = (queries @ bias).squeeze(-1)  # (B, H, K)
            if self.folded:
                keys = self._heads_of(self.key, queries.dtype)
                # One set of queries takes fewer operations; several are multiplied together, without copies of the keys.
                if queries.shape[0] == 1:
                    folded = torch.bmm(queries[0], keys)[None]
                else:
                    by_head = torch.bmm(queries.transpose(0, 1).flatten(1, 2), keys)
                    folded = by_head.unflatten(1, (-1, self.num_slots)).transpose(0, 1)
                queries = folded.flatten(1, 2).unsqueeze(1)  # (B, 1, H K, in_dim)
            context["queries"] = queries
            return context

    def accumulate(self, context: Context, features: Tensor, mask: Tensor | None) -> dict[str, Accumulator]:
        with self._no_autocast():
            context, features = self._common(context, features)
            slots = (self.heads, self.num_slots)
            queries, offset = context["queries"], context.get("offset")
            if self.folded:
                return {"pooled": shared_rows(queries, features, offset, self.activation, slots, mask)}
            return {"pooled": weighted_sums(queries, features, self._project_direct, offset, self.activation, slots, mask)}

    @property
    def has_pull_back(self) -> bool:
        return self.folded and type(self).accumulate is UMBC.accumulate

    def pull_back(
        self, context: Context, features: Tensor, mask: Tensor | None, whole: Cotangents, want: Want
    ) -> tuple[Tensor | None, Context]:
        with self._no_autocast():
            context, features = self._common(context, features)
            names = ("shift", "numerator", "normaliser")
            shift, numerator, normaliser = (whole["pooled", name].to(features.dtype) for name in names)
            queries, offset = context["queries"].flatten(1, 2), context.get("offset")
            bars = pull_back(queries, features, offset, self.activation, mask, shift, numerator.flatten(1, 2), normaliser, want)
            to_context = {} if bars.queries is None else {"queries": bars.queries.unsqueeze(1)}
            return bars.rows, to_context if bars.offset is None else to_context | {"offset": bars.offset}

    def forward(self, features: Tensor, mask: Tensor | None = None) -> Tensor:
        """z of whole sets (B, N, in_dim). The softmax of a set needs no state; without a graph, it is one fused attention."""
        fitting = features.dim() == 3 and features.shape[-1] == self.in_dim and features.is_floating_point()
        plain = self.has_pull_back and type(self).finalize is UMBC.finalize  # no subclass has another state or result
        softmax = mask is None and self.activation == ACTIVATIONS["softmax"]
        if not (fitting and plain and softmax and features.shape[1]) or torch.compiler.is_compiling():
            return super().forward(features, mask)
        with self._no_autocast():
            batch, slots = features.shape[0], (self.heads, self.num_slots)
            begun = State(self.draw_accumulators(batch, features.device, None), features.new_empty(batch))
            context, rows = self._common(self.prepare(begun), features)
            state = State(begun.accumulators, begun.count, context=context)
            queries, offset = context["queries"], context.get("offset")
            if fuses(features, slots[0] * slots[1], offset, self.activation, mask):
                means = fused_means(queries, rows)[0].view(batch, *slots, -1)
            else:
                sums = shared_rows(queries, rows, offset, self.activation, slots, mask)
                means = sums["numerator"] / sums["normaliser"].unsqueeze(-1)
            return self._to_slots(means, None, state)

    def finalize(self, state: State) -> Tensor:
        with self._no_autocast():
            pooled = cast(LogSums, state.accumulators["pooled"])
            if self.activation.normalise:
                values, weight = pooled.mean(), pooled["normaliser"] > 0
            else:
                values, weight = pooled.true_sums()
            return self._to_slots(values, weight, state)

    def _to_slots(self, values: Tensor, weight: Tensor | None, state: State) -> Tensor:
        """z from pooled values (B, H, K, E) and the factor of bv in each slot (B, H, K); None: one."""
        dtype = torch.promote_types(self.value.weight.dtype, torch.float32)
        values = values.to(dtype).transpose(0, 1)  # (H, B, K, E)
        if self.folded:
            values = torch.bmm(values.flatten(1, 2), self._heads_of(self.value, dtype).mT).unflatten(1, values.shape[1:3])
        if self.value.bias is not None:
            bias = self.value.bias.to(dtype).view(self.heads, 1, 1, -1)
            factor = None if weight is None else weight.to(dtype).transpose(0, 1).unsqueeze(-1)
            values = values + bias if factor is None else torch.addcmul(values, factor, bias)
        z = values.permute(1, 2, 0, 3).flatten(2)  # (B, K, d)
        if self.slot_residual:
            z = z + self._queries(state)
        z = self.norm(z.to(self.value.weight.dtype))
        if self.training and self.slot_dropout:
            kept = torch.rand(z.shape[:2], device=z.device).unsqueeze(-1) >= self.slot_dropout
            z = z * kept / (1.0 - self.slot_dropout)
        return z

    def attention(self, features: Tensor, state: State, mask: Tensor | None = None) -> Tensor:
        """Weights (B, H, K, n) of a chunk's features (B, n, in_dim) against a finished state, zero where masked."""
        with self._no_autocast():
            pooled = cast(LogSums, state.accumulators["pooled"])
            context, features = self._common(self.prepare(state), features)
            batch = len(features)
            if not features.shape[1]:
                return features.new_zeros(batch, self.heads, self.num_slots, 0)
            queries = context["queries"].expand(batch, *context["queries"].shape[1:]).flatten(0, 1)
            keys = features.mT if self.folded else self._project_direct(features)[0]
            slots = (batch, self.heads, self.num_slots)
            weights, shift, _ = log_weights(queries, keys, context.get("offset"), self.activation, slots, mask)
            return pooled.shares(weights, shift) if self.activation.normalise else weights * shift.exp().unsqueeze(-1)

    def permute_slots_(self, order: Tensor) -> None:
        """Reorder the slots in place, for the law of slot equivariance."""
        self.slots.permute_(order)

    # -- helpers ------------------------------------------------------------------------------------------------------

    def _queries(self, state: State) -> Tensor:
        """Q (B or 1, K, d), in float32 at least."""
        known = None if state.context is None else state.context.get("slots")
        if known is not None and (known.requires_grad or not torch.is_grad_enabled()):
            return known
        slots = given_slots(state)
        if slots is None:
            slots = self.own_slots(state)
        elif slots.shape[1:] != (self.num_slots, self.slot_dim):
            raise ShapeError(
                f"the slots given to this pass must be (B, {self.num_slots}, {self.slot_dim}); the module before it gave "
                f"{tuple(slots.shape)}"
            )
        queries = self.query_norm(self.query(slots.to(self.query.weight.dtype)))
        return queries.to(torch.promote_types(queries.dtype, torch.float32))

    def own_slots(self, state: State) -> Tensor:
        draw = state.accumulators.get("draw")
        return self.slots(None if draw is None else draw["noise"])

    def _split(self, rows: Tensor) -> Tensor:
        """(B, K, d) to (B, H, K, d/H)."""
        return rows.unflatten(-1, (self.heads, -1)).transpose(1, 2)

    def _heads_of(self, linear: nn.Linear, dtype: torch.dtype) -> Tensor:
        """A projection's weight by heads: (H, d/H, in_dim)."""
        return linear.weight.to(dtype).view(self.heads, -1, linear.in_features)

    def _project_direct(self, features: Tensor) -> tuple[Tensor, Tensor]:
        """Keys (B H, d/H, n) and values (B H, n, d/H), without biases: those enter as `offset` and in `finalize`."""
        batch, size = features.shape[:2]
        weights = [linear.weight.to(features.dtype) for linear in (self.key, self.value)]
        if not torch.compiler.is_compiling() and batch == 1:  # a graph must fit any batch
            keys, values = ((weight @ features[0].T).view(self.heads, -1, size) for weight in weights)
        else:
            by_head = [F.linear(features, weight).unflatten(-1, (self.heads, -1)) for weight in weights]
            keys, values = (rows.permute(0, 2, 3, 1).flatten(0, 1) for rows in by_head)
        return keys, values.mT

    @staticmethod
    def _common(context: Context, features: Tensor) -> tuple[Context, Tensor]:
        """Queries and features in one floating-point type: the wider of the two, float32 at least."""
        if context["queries"].dtype == features.dtype:  # a context has one type
            return context, features
        dtype = torch.promote_types(context["queries"].dtype, features.dtype)
        return {name: tensor.to(dtype) for name, tensor in context.items()}, features.to(dtype)

    def _no_autocast(self) -> AbstractContextManager[Any]:
        """Logits, exponentials and sums are computed in float32 at least, also under autocast."""
        device = self.query.weight.device.type
        return torch.autocast(device, enabled=False) if torch.is_autocast_enabled(device) else nullcontext()

    def extra_repr(self) -> str:
        form = "folded" if self.folded else "direct"
        return f"{self.in_dim} -> {self.num_slots} x {self.out_dim}, heads={self.heads}, {self.activation.name}, {form}"
