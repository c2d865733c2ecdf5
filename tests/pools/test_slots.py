import pytest
import torch
from torch.nn import functional as F

import setstream as ss


def test_gaussian_slots_are_drawn_once_a_set_and_pass_in_training_and_are_the_mean_in_eval():
    pool = ss.UMBC(8, 4, slots="gaussian")
    with torch.no_grad():
        pool.slots.raw_std.fill_(1.0)
    x = torch.randn(1, 20, 8).expand(3, -1, -1)
    z = pool.train()(x)
    assert not torch.allclose(z[0], z[1])  # one draw a set
    assert not torch.allclose(z, pool(x))  # one draw a pass
    z = pool.eval()(x)
    torch.testing.assert_close(z, pool(x))
    learned = ss.UMBC(8, 4, slots="learned").eval()
    learned.load_state_dict({name: value for name, value in pool.state_dict().items() if "raw_std" not in name})
    torch.testing.assert_close(learned(x), z)


@pytest.mark.parametrize("kind", ["gaussian", "shared-gaussian"])
def test_slot_draws_have_the_stated_mean_and_deviation(kind):
    """20,000 draws; |z| below 4.5 for each of 3 x 2 means, and the deviation within 5 standard errors."""
    slots = ss.UMBC(2, 3, slots=kind).slots.train()
    with torch.no_grad():
        slots.raw_std.uniform_(-1, 1)
    draws = slots(slots.draw(20_000, torch.device("cpu"), torch.Generator().manual_seed(0))).detach()
    std = F.softplus(slots.raw_std).expand(3, 2).detach()
    z = (draws.mean(0) - slots.mean.detach()) / (std / 20_000**0.5)
    assert z.abs().max() < 4.5
    assert ((draws.std(0) / std - 1).abs() < 5 / (2 * 20_000) ** 0.5).all()


def test_the_mean_of_a_shared_gaussian_makes_equal_slots_and_a_fixed_draw_does_not():
    x = torch.randn(1, 20, 8)
    mean = ss.UMBC(8, 4, slots="shared-gaussian").eval()(x)
    assert torch.allclose(mean[:, 0], mean[:, 1])
    fixed = ss.UMBC(8, 4, slots="shared-gaussian", eval_slots="fixed").eval()
    with torch.no_grad():
        fixed.slots.raw_std.fill_(1.0)
    assert not torch.allclose(fixed(x)[:, 0], fixed(x)[:, 1])
    again = ss.UMBC(8, 4, slots="shared-gaussian", eval_slots="fixed").eval()
    again.load_state_dict(fixed.state_dict())
    torch.testing.assert_close(again(x), fixed(x))


def test_all_slot_parameters_learn():
    for kind in ("learned", "gaussian", "shared-gaussian"):
        pool = ss.UMBC(8, 4, slots=kind, activation="sigmoid", slot_residual=True, norm_after=True)
        (pool(torch.randn(2, 10, 8)) * torch.randn(2, 4, 8)).sum().backward()
        assert all(p.grad is not None and p.grad.abs().sum() > 0 for p in pool.parameters()), kind
