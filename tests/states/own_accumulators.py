"""A user's own accumulators and pools, as docs/your-own-pool.md has them: nothing of the library knows their names."""

import torch

import setstream as ss
from setstream.states.accumulators import Accumulator, Sums


class TopK(Accumulator):
    """The k largest values of each feature, in falling order: value (B, k, D)."""

    kind = "tests.top-k"
    owned_by_one_element = True

    def merge(self, other):
        return TopK(value=self._both(other).topk(self["value"].shape[1], dim=1).values)

    def _both(self, other):
        return torch.cat(torch.broadcast_tensors(self["value"], other["value"]), dim=1)

    def fault(self, seen):
        value = self["value"]
        in_order = (value[:, :-1] >= value[:, 1:]).all() and not value.isnan().any() and not value.isposinf().any()
        return None if in_order and bool((value[:, 0].isfinite().all(-1) == seen).all()) else "not the largest of any elements"

    # The gradient: each entry belongs to one element.

    def merge_owners(self, other, owners, other_owners):
        chosen = self._both(other).topk(self["value"].shape[1], dim=1).indices
        return torch.cat(torch.broadcast_tensors(owners, other_owners), dim=1).gather(1, chosen)

    def contribution(self, whole, owned=None):
        # The r-th entry of the whole that this chunk owns is the r-th largest of the chunk.
        place = (owned.cumsum(1) - 1).clamp(min=0)
        return {"value": self["value"].gather(1, place).masked_fill(~owned, 0.0)}


class TopKMean(ss.Pool):
    """The mean of the k largest values of each feature, or of all where there are fewer."""

    def __init__(self, k=4):
        super().__init__()
        self.k = k

    def empty_accumulators(self, batch, device, width=None):
        return {"largest": TopK(value=torch.full((batch, self.k, width or 1), -torch.inf, device=device))}

    def accumulate(self, context, features, mask):
        if mask is not None:
            features = features.masked_fill(~mask.unsqueeze(-1), -torch.inf)
        absent = features.new_full((len(features), self.k, features.shape[-1]), -torch.inf)
        return {"largest": TopK(value=torch.cat([features, absent], dim=1).topk(self.k, dim=1).values)}

    def finalize(self, state):
        value = state.accumulators["largest"]["value"]
        real = value.isfinite()
        return torch.where(real, value, 0.0).sum(1) / real.sum(1).clamp(min=1)


class Counts(Sums):
    """How often a hash fell into each cell: total (B, rows, cells), whole numbers without a gradient."""

    kind = "tests.count-min"

    def graded(self):
        return ()

    def fault(self, seen):
        total = self["total"]
        right = total.dtype == torch.int64 and (total >= 0).all() and (total.sum(-1) > 0).eq(seen[:, None]).all()
        return None if right else "not the counts of any elements"


class CountMin(ss.Pool):
    """A count-min sketch of which of many values the first feature has: estimated counts (B, values)."""

    def __init__(self, values=50, rows=4, cells=16):
        super().__init__()
        generator = torch.Generator().manual_seed(0)
        self.register_buffer("hashes", torch.randint(cells, (rows, values), generator=generator))
        self.cells = cells

    def empty_accumulators(self, batch, device, width=None):
        return {"counts": Counts(total=torch.zeros(batch, len(self.hashes), self.cells, dtype=torch.int64, device=device))}

    def accumulate(self, context, features, mask):
        cells = self.hashes[:, features[..., 0].round().long() % self.hashes.shape[1]].movedim(0, 1)  # (B, rows, n)
        ones = torch.ones_like(cells) if mask is None else mask.long().unsqueeze(1).expand_as(cells)
        return {
            "counts": Counts(total=torch.zeros(*cells.shape[:2], self.cells, dtype=torch.int64).scatter_add(2, cells, ones))
        }

    def finalize(self, state):
        total = state.accumulators["counts"]["total"]
        return total.gather(2, self.hashes.expand(len(total), -1, -1)).amin(1).double()


POOLS = {"top-k": TopKMean, "count-min": CountMin}


def make(name):
    torch.manual_seed(0)
    phi = torch.nn.Sequential(torch.nn.Linear(3, 8), torch.nn.Tanh()) if name == "top-k" else torch.nn.Identity()
    return ss.SetEncoder(phi, POOLS[name]())
