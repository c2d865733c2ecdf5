"""Set functions that need their whole, small input: heads for the slots of a pool, and baselines. `Standardise` is for phi.

All others take sets (B, N, dim) and an optional bool mask (B, N), True for real elements.
"""

from setstream.nn.diff_em import DiffEM
from setstream.nn.fspool import FSPool
from setstream.nn.mil import DSMIL, GatedAttention
from setstream.nn.set_transformer import ISAB, MAB, PMA, SAB, SetTransformer
from setstream.nn.standardise import Standardise
from setstream.nn.transmil import TransMIL

__all__ = [
    "DSMIL", "ISAB", "MAB", "PMA", "SAB", "DiffEM", "FSPool", "GatedAttention", "SetTransformer", "Standardise", "TransMIL",
]  # fmt: skip
