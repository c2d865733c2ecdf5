"""The two theorems of the paper that promise something about training: on problems small enough to see it."""

import pytest
import torch
from torch import nn

import setstream as ss

STEPS = 400


def full_gradient(encoder, head, x, y):
    loss = (head(ss.encode(encoder, x, gradient="full")).flatten() - y).square().mean()
    gradients = torch.autograd.grad(loss, [*encoder.parameters(), *head.parameters()])
    return float(torch.stack([gradient.square().sum() for gradient in gradients]).sum().sqrt())


@pytest.mark.parametrize("gradient", ["unbiased", "importance", "subset"])
def test_convergence(gradient):
    """SGD with steps 1/(1 + t/20), 400 of them, through 4 of 32 elements: the full gradient vanishes, that of subsets does not.

    With steps whose squares have a finite sum, the theorem (appendix) promises min_t E|∇L|² -> 0 for an unbiased gradient.
    """
    torch.manual_seed(0)
    x = torch.randn(16, 32, 2, dtype=torch.float64)
    encoder = ss.SetEncoder(nn.Linear(2, 8).double(), ss.DeepSets("mean"))
    head = nn.Sequential(nn.Tanh(), nn.Linear(8, 1)).double()
    y = x.mean(1).square().sum(-1)  # of a mean: a subset's answer is another one
    before = full_gradient(encoder, head, x, y)
    parameters = [*encoder.parameters(), *head.parameters()]
    generator, norms = torch.Generator().manual_seed(1), []
    for step in range(STEPS):
        z = ss.encode(encoder, x, gradient=gradient, chunk_size=4, generator=generator)
        gradients = torch.autograd.grad((head(z).flatten() - y).square().mean(), parameters)
        with torch.no_grad():
            for parameter, direction in zip(parameters, gradients, strict=True):
                parameter -= 0.3 / (1 + step / 20) * direction
        if step >= STEPS - 10:
            norms.append(full_gradient(encoder, head, x, y))
    assert (min(norms) < 0.03 * before) == (gradient != "subset")


@pytest.mark.parametrize("function", ["amax", "prod"])
def test_universal_approximation(function):
    """Functions of three numbers in [0, 1], each learned to an R² of 0.99 by UMBC with an MLP behind it."""
    torch.manual_seed(0)
    encoder = ss.SetEncoder(nn.Sequential(nn.Linear(1, 32), nn.Tanh()), ss.UMBC(32, num_slots=4))
    model = nn.Sequential(nn.Flatten(), nn.Linear(128, 64), nn.Tanh(), nn.Linear(64, 1))
    optimizer = torch.optim.Adam([*encoder.parameters(), *model.parameters()], lr=5e-3)

    def target(x):
        return getattr(x.squeeze(-1), function)(1)

    for _ in range(STEPS):
        x = torch.rand(128, 3, 1)
        loss = (model(encoder(x)).flatten() - target(x)).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    test = torch.rand(2000, 3, 1)
    with torch.no_grad():
        error = (model(encoder(test)).flatten() - target(test)).square().mean() / target(test).var()
    assert float(error) < 0.01
