"""Two threads that encode with one encoder at once get the gradients that each gets alone."""

import threading

import pytest
import torch
from torch import nn

import setstream as ss
from tests.gradients.builders import make

MODES = [
    {"gradient": "full"},
    {"gradient": "exact"},
    {"gradient": "unbiased", "grad_chunks": 2},
    {"gradient": "importance", "grad_chunks": 2},
    {"gradient": "importance", "features": "recompute"},
    {"gradient": "subset", "grad_chunks": 2},
]
ROUNDS = 10


def gradients(encoder, x, options):
    parameters = list(encoder.parameters())
    z = ss.encode(encoder, x, chunk_size=5, generator=torch.Generator().manual_seed(3), **options)
    return torch.autograd.grad(z.square().sum(), parameters, allow_unused=True)


class Yielding(nn.Module):
    """Lets other threads run in the middle of phi."""

    def __init__(self, barrier):
        super().__init__()
        self.barrier = barrier

    def forward(self, x):
        try:
            self.barrier.wait(timeout=0.05)
        except threading.BrokenBarrierError:
            self.barrier.reset()
        return x


@pytest.mark.parametrize("options", MODES, ids=lambda options: " ".join(map(str, options.values())))
def test_each_mode(options):
    barrier = threading.Barrier(2)
    phi = nn.Sequential(nn.Linear(3, 8), Yielding(barrier), nn.Tanh(), nn.Linear(8, 8))
    encoder = make(phi=phi).double().eval()
    sets = [torch.randn(2, 21, 3, dtype=torch.float64) for _ in range(2)]
    expected = [gradients(encoder, x, options) for x in sets]
    wrong = []

    def work(number):
        for _ in range(ROUNDS):
            for a, b in zip(gradients(encoder, sets[number], options), expected[number], strict=True):
                if (a is None) != (b is None) or (a is not None and not torch.allclose(a, b, rtol=1e-9, atol=1e-12)):
                    wrong.append(number)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


def test_dropout_in_phi_draws_the_same_masks_both_ways_in_every_thread():
    """With all elements equal to one another the mask alone decides, and forward and backward must have the same."""
    encoder = ss.SetEncoder(nn.Sequential(nn.Linear(1, 1, bias=False), nn.Dropout(0.5)), ss.DeepSets("sum")).double().train()
    weight = encoder.phi[0].weight
    x = torch.ones(1, 64, 1, dtype=torch.float64)
    wrong = []

    def work():
        for _ in range(50):
            z = ss.encode(encoder, x, chunk_size=8, gradient="exact")
            (gradient,) = torch.autograd.grad(z.sum(), weight)
            if not torch.allclose(gradient * weight, z.sum()):  # z is linear in the weight
                wrong.append(float(gradient * weight - z.sum()))

    threads = [threading.Thread(target=work) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong
