"""Encoders, models and sets that the tests of all modes share."""

import torch
from torch import nn

import setstream as ss
from setstream.pools.base import named_tensors
from setstream.testing.gradients import default_loss, parameter_gradients

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


def mean_of_copies(copies):
    """`default_loss` of each copy of a batch, averaged."""

    def loss(output):
        apart = {name: tensor.unflatten(0, (copies, -1)) for name, tensor in named_tensors(output)}
        return torch.vmap(default_loss)(apart).mean()

    return loss


def check_unbiased(subject, sets=SETS, groups=100, copies=40, read=list, **options):
    """`check_unbiased_gradient` over groups * copies = 4,000 draws: the copies of the sets in one call are independent draws.

    The z-scores are those of the mean of all draws, with the standard error that the means of the groups show.
    read: makes a source of the list of sets. The options go to `encode`.
    """

    def estimate(model, batch, generator):
        return parameter_gradients(model, read(batch * copies), mean_of_copies(copies), generator=generator, **options)

    return ss.testing.check_unbiased_gradient(subject, sets, draws=groups, estimate=estimate)
