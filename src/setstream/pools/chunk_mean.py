"""The baseline that is *not* consistent: any set function on each chunk, then the mean::

    z = (1/C) Σ_c f(chunk_c)          C chunks; f sees one chunk at a time and never the set

This is how set functions that need their whole input are commonly run on streams (appendix E of the UMBC paper). The answer
depends on where the set was cut; `ss.testing.check_mini_batch_consistency` measures it. A set that is given in more than one
chunk is therefore an error, unless the caller passes chunks="average".
"""

from typing import cast

import torch
from torch import Tensor, nn

from setstream.pools.base import Context, Pool
from setstream.states.accumulators import Accumulator, Chunks, LogSums, accumulator_dtype, align
from setstream.states.state import State


class ChunkMean(Pool):
    """The mean of module(chunk) over the chunks: features (B, n, D) to the output of the module, (B, ...).

    The module is called as module(features) or module(features, mask=mask).

    >>> import torch, setstream as ss
    >>> pool = ss.ChunkMean(ss.nn.SetTransformer(8))
    >>> pool.consistent
    False
    >>> pool(torch.randn(2, 10, 8)).shape
    torch.Size([2, 1, 8])
    """

    consistent = False

    def __init__(self, module: nn.Module, in_dim: int | None = None) -> None:
        super().__init__()
        self.module, self.in_dim = module, in_dim

    @property
    def title(self) -> str:
        return f"ChunkMean({type(self.module).__name__})"

    def empty_accumulators(self, batch: int, device: torch.device, width: int | None = None) -> dict[str, Accumulator]:
        # Of width one until the width of the module's output is known.
        chunks = Chunks(seen=torch.zeros(batch, dtype=torch.int64, device=device))
        return {"pooled": LogSums.nothing((batch, 1), (batch,), device), "chunks": chunks}

    def accumulate(self, context: Context, features: Tensor, mask: Tensor | None) -> dict[str, Accumulator]:
        encoded: Tensor = self.module(features) if mask is None else self.module(features, mask=mask)
        dtype = accumulator_dtype(features.device)
        seen = features.new_ones(features.shape[0]) if mask is None else mask.any(1)
        chunks = seen.to(dtype)
        pooled = LogSums.of_ones(encoded.to(dtype) * align(chunks, encoded), chunks, encoded.dtype)
        return {"pooled": pooled, "chunks": Chunks(seen=chunks.long())}

    def chunks_seen(self, state: State) -> Tensor:
        return state.accumulators["chunks"]["seen"]

    def finalize(self, state: State) -> Tensor:
        """The mean over the chunks; zeros without chunks."""
        return cast(LogSums, state.accumulators["pooled"]).mean()
