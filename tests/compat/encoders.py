"""The encoders whose states are kept as golden files: one for each pool, small, under names that never change."""

from collections.abc import Callable

import torch
from torch import nn

import setstream as ss

WIDTH, INPUTS = 8, 3

POOLS: dict[str, Callable[[], ss.Pool]] = {
    "umbc-softmax": lambda: ss.UMBC(WIDTH, num_slots=4, out_dim=8, heads=2),
    "umbc-sigmoid": lambda: ss.UMBC(WIDTH, num_slots=4, activation="sigmoid"),
    "umbc-slot-softmax": lambda: ss.UMBC(WIDTH, num_slots=4, activation="slot-softmax", slot_residual=True),
    "umbc-slot-sigmoid": lambda: ss.UMBC(WIDTH, num_slots=4, activation="slot-sigmoid", norm_after=True),
    "umbc-slot-exp": lambda: ss.UMBC(WIDTH, num_slots=4, activation="slot-exp"),
    "umbc-gaussian": lambda: ss.UMBC(WIDTH, num_slots=4, slots="gaussian", fold=False),
    "deepsets-mean": lambda: ss.DeepSets("mean"),
    "deepsets-sum": lambda: ss.DeepSets("sum", in_dim=WIDTH),
    "deepsets-max": lambda: ss.DeepSets("max"),
    "deepsets-min": lambda: ss.DeepSets("min"),
    "sse": lambda: ss.SSE(WIDTH, num_slots=4, heads=2),
    "hierarchical-sse": lambda: ss.HierarchicalSSE(WIDTH, num_slots=(4, 2)),
    "parallel": lambda: ss.Parallel(
        slots=ss.UMBC(WIDTH, num_slots=2), top=ss.Projected(nn.Linear(WIDTH, 2), ss.DeepSets("max"))
    ),
    "chunk-mean": lambda: ss.ChunkMean(ss.nn.SetTransformer(WIDTH, heads=2), WIDTH),
}


def build(name: str) -> ss.SetEncoder:
    """The encoder of a golden state, with weights that are yet to be loaded."""
    phi = nn.Sequential(ss.nn.Standardise(INPUTS), nn.Linear(INPUTS, WIDTH), nn.LeakyReLU(0.2), nn.LayerNorm(WIDTH))
    return ss.SetEncoder(phi, POOLS[name]()).eval()


def model() -> ss.SetModel:
    """The model of the golden store."""
    return ss.SetModel(build("umbc-softmax"), nn.Sequential(nn.Flatten(1), nn.Linear(32, 2))).eval()


def elements(seed: int, count: int = 20) -> torch.Tensor:
    """Numbers that every version of torch makes alike."""
    grid = torch.arange(count * INPUTS, dtype=torch.float64) * 0.7310585 + seed * 0.31
    return (torch.sin(grid * 12.9898) * 1.7).reshape(1, count, INPUTS).float()
