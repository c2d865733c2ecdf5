"""SSE in every task: with its weights divided by their sum it is a mean, without it a sum over the set."""

import pytest
import torch
from torch import nn

import setstream as ss
from setstream.tasks.clustering.models import MODELS as CLUSTERING
from setstream.tasks.completion.models import MODELS as COMPLETION
from setstream.tasks.documents.models import Shared, sse
from setstream.tasks.mil.models import MODELS as MIL

BUILD = {
    "clustering": lambda **options: CLUSTERING["sse"](**options),
    "completion": lambda **options: COMPLETION["sse"](**options),
    "documents": lambda **options: sse(Shared(None, 3, nn.Embedding(50, 16), 0.1), **options),
    "mil": lambda **options: MIL["sse"](in_dim=6, **options),
}
ELEMENTS = {"clustering": (2,), "completion": (5,), "documents": (), "mil": (6,)}


def sets(task, size=40):
    torch.manual_seed(0)
    return torch.randint(50, (2, size)) if task == "documents" else torch.rand(2, size, *ELEMENTS[task])


@torch.no_grad()
@pytest.mark.parametrize("task", BUILD)
@pytest.mark.parametrize(("options", "factor"), [({}, 1.0), ({"normalise": False}, 2.0)])
def test_a_set_given_twice(task, options, factor):
    torch.manual_seed(0)
    encoder, x = BUILD[task](**options).eval().encoder.double(), sets(task)
    x = x.double() if x.is_floating_point() else x
    once, twice = encoder(x), encoder(torch.cat([x, x], 1))
    torch.testing.assert_close(twice, factor * once)


@torch.no_grad()
def test_without_normalising_the_mean_over_slots_is_a_plain_sum():
    """The weights of an element sum to one over the slots: attention chooses nothing."""
    torch.manual_seed(0)
    pool = ss.SSE(6, num_slots=4, pool="mean", normalise=False).eval().double()
    x = torch.randn(2, 30, 6).double()
    umbc = next(module for module in pool.modules() if isinstance(module, ss.UMBC))
    torch.testing.assert_close(pool(x), umbc.value(x).sum(1) / 4)
