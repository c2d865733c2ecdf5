"""Small encoders and sets for the tests of states."""

import torch
from torch import nn

import setstream as ss


def make(pool=None, seed=0):
    torch.manual_seed(seed)
    return ss.SetEncoder(nn.Linear(3, 8), pool or ss.UMBC(8, 4, heads=2)).eval()


def close(a, b, tolerance=1e-5):
    return float((a - b).detach().abs().max()) <= tolerance * float(b.detach().abs().max())
