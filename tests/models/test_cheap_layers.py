"""phi and the pool on tiles: the same answer, errors before anything is added, no synchronisation per tile."""

import copy

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

import setstream as ss
from setstream.pools.kernels.cheap_layers import CheapLayers

CHAINS = {
    "identity": lambda: nn.Identity(),
    "linear": lambda: nn.Linear(6, 6),
    "no bias": lambda: nn.Sequential(nn.Linear(6, 9, bias=False), nn.Tanh(), nn.Linear(9, 6)),
    "activation first": lambda: nn.Sequential(nn.ReLU(), nn.Linear(6, 6), nn.SiLU(), nn.Sigmoid()),
    "nested": lambda: nn.Sequential(nn.LayerNorm(6), nn.Sequential(nn.Linear(6, 12), nn.GELU()), nn.Linear(12, 6), nn.ELU()),
}


@pytest.mark.parametrize("name", CHAINS)
def test_a_chain_gives_what_phi_gives_and_leaves_its_input_alone(name):
    phi = CHAINS[name]()
    layers = CheapLayers.of(phi)
    assert layers is not None
    chain = CheapLayers(layers)
    with torch.no_grad():
        for size in (5, 3, 8):  # the memory of an earlier call is used again, or too small
            x = torch.randn(size, 6)
            before = x.clone()
            torch.testing.assert_close(chain(x), phi(x))
            assert torch.equal(x, before)


def test_what_is_not_a_chain_of_cheap_layers_is_called_as_it_is():
    class Own(nn.Linear):
        pass

    hooked = nn.Sequential(nn.Linear(6, 6))
    hooked[0].register_forward_hook(lambda *_: None)
    for phi in (
        Own(6, 6),
        hooked,
        nn.Sequential(nn.Linear(6, 6), nn.Dropout()),
        nn.Conv1d(1, 1, 1),
        nn.ModuleList([nn.ReLU()]),
    ):
        assert CheapLayers.of(phi) is None


@pytest.mark.parametrize("name", CHAINS)
@pytest.mark.parametrize("pool", [lambda: ss.UMBC(6, 3, heads=2), lambda: ss.DeepSets("max"), lambda: ss.SSE(6, 3)])
def test_tiles_give_the_answer_of_whole_sets_in_float64(name, pool):
    torch.manual_seed(0)
    encoder = ss.SetEncoder(CHAINS[name](), pool()).eval()
    sets = [torch.randn(size, 6) for size in (70_000, 0, 3, 5_000, 5_000)]
    expected = copy.deepcopy(encoder).double()([x.double() for x in sets])
    whole = encoder(sets)  # with a graph: phi reads all elements at once
    with torch.no_grad():
        tiled = encoder(sets)
    error, allowed = ((z - expected).abs().max() / expected.abs().max() for z in (tiled, whole))
    assert error <= 2 * allowed + 1e-6
    assert error < 1e-4


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("phi", [nn.Identity(), nn.Sequential(nn.Linear(6, 6), nn.ReLU())])
def test_a_bad_number_in_any_tile_is_an_error_that_names_its_element(phi, value):
    encoder = ss.SetEncoder(phi, ss.UMBC(6, 3)).eval()
    x = torch.randn(1, 100_000, 6)
    x[0, 98_765, 3] = value
    state = encoder.update(None, torch.randn(1, 10, 6))
    with torch.no_grad(), pytest.raises(ss.errors.NonFiniteError, match="1 of 100000 elements .* element 98765"):
        encoder.update(state, x)
    assert state.count.tolist() == [10]


class Synchronisations(TorchDispatchMode):
    """Counts the calls that would make a GPU wait: numbers read by Python, and results of unknown size."""

    def __init__(self):
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        name = str(function)
        waits = any(word in name for word in ("_local_scalar_dense", "nonzero", "equal.default", "masked_select", "unique"))
        self.count += waits
        return function(*args, **(kwargs or {}))


@pytest.mark.parametrize("gradient", ["none", "exact", "unbiased", "importance"])
def test_nothing_waits_for_single_tiles(gradient):
    """Ten times the tiles, the same number of waits. Counted on the CPU; not run on a GPU."""
    encoder = ss.SetEncoder(nn.Sequential(nn.Linear(2, 8), nn.ReLU()), ss.UMBC(8, 4, heads=2)).train()
    counts = []
    for size in (50_000, 500_000):
        x = torch.randn(2, size, 2)
        with Synchronisations() as waits:
            z = ss.encode(encoder, x, chunk_size=1_000_000 if gradient == "exact" else 64, gradient=gradient)
            if gradient != "none":
                z.sum().backward()
        counts.append(waits.count)
    assert counts[0] == counts[1]
