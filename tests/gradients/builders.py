"""Encoders, models and sets that the tests of all modes share."""

import torch
from torch import nn

import setstream as ss

SETS = [torch.randn(n, 3, generator=torch.Generator().manual_seed(n)) for n in (40, 23, 9)]


def make(pool=None, phi=None, seed=0):
    torch.manual_seed(seed)
    phi = phi or nn.Sequential(nn.Linear(3, 8), nn.Tanh())
    return ss.SetEncoder(phi, pool or ss.UMBC(8, 3, heads=2, slot_residual=True, norm_after=True))


def model(pool=None, seed=0):
    return ss.SetModel(make(pool, seed=seed), nn.Sequential(ss.nn.SAB(8), nn.Linear(8, 2)))


def ragged_chunks(sets, size):
    longest = max(len(x) for x in sets)
    return [[x[i : i + size] for x in sets] for i in range(0, longest, size)]
