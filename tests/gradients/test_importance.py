"""importance: unbiased, exact for the pool, and the same however the features are kept."""

import numpy as np
import pytest
import torch
from torch import nn

import setstream as ss
from setstream import testing
from setstream.gradients.importance import inclusion_probabilities, systematic_draw
from setstream.testing.gradients import default_loss, parameter_gradients
from tests.gradients.builders import SETS, check_unbiased, make


@pytest.mark.parametrize(
    "pool", [None, ss.UMBC(8, 3, activation="slot-sigmoid"), ss.DeepSets("mean")], ids=["umbc", "sum", "mean"]
)
@pytest.mark.parametrize("wanted", [1, 2])
def test_importance_is_unbiased(pool, wanted):
    check_unbiased(make(pool), gradient="importance", chunk_size=3, grad_chunks=wanted)


def test_importance_is_exact_for_the_pool_and_for_a_maximum():
    encoder = make().double().eval()
    sets = [x.double() for x in SETS]
    full = parameter_gradients(encoder, sets, default_loss, gradient="full")
    one = parameter_gradients(encoder, sets, default_loss, gradient="importance", chunk_size=2)
    for name in full:
        if name.startswith("pool."):
            torch.testing.assert_close(one[name], full[name], rtol=1e-9, atol=1e-11)
    # Eight features have at most eight elements that matter: ten draws hold them all.
    testing.check_exact_gradient(make(ss.DeepSets("max")), SETS, gradient="importance", chunk_size=10)


@pytest.mark.parametrize("features", ["cache", "recompute", "folder"])
@pytest.mark.parametrize("pool", [None, ss.DeepSets("mean"), ss.DeepSets("sum"), ss.DeepSets("max"), ss.SSE(8, 3)])
def test_importance_gives_the_same_however_features_are_kept(features, pool, tmp_path):
    encoder = make(pool).eval()
    where = tmp_path if features == "folder" else features
    found = []
    for keep in ("cache", where):
        generator = torch.Generator().manual_seed(3)
        found.append(
            parameter_gradients(
                encoder, SETS, default_loss, gradient="importance", chunk_size=4, features=keep, generator=generator
            )
        )
    for name in found[0]:
        torch.testing.assert_close(found[0][name], found[1][name], rtol=1e-4, atol=1e-5)
    assert not list(tmp_path.iterdir())  # nothing is left behind


def test_randomness_that_no_class_name_tells_is_noticed(tmp_path):
    class Noisy(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = nn.Linear(3, 8)

        def forward(self, x):
            return nn.functional.dropout(self.linear(x), 0.5, self.training)

    encoder = ss.SetEncoder(Noisy(), ss.UMBC(8, 2)).train()
    for sets in (torch.randn(1, 20, 3), ss.Chunks(torch.randn(1, 20, 3).split(5, 1))):
        with pytest.raises(ss.errors.ConfigurationError, match="draws random numbers"):
            ss.encode(encoder, sets, gradient="importance")
    with pytest.raises(ss.errors.ConfigurationError, match="an existing folder"):
        ss.encode(encoder.eval(), torch.randn(1, 20, 3), gradient="importance", features="cach")


def test_elements_are_drawn_with_their_probabilities_and_never_twice():
    rng = np.random.default_rng(0)
    counts = np.array([40, 3, 40, 1])
    weights = rng.exponential(size=counts.sum()) ** 2
    weights[7] = 0.0
    probabilities = inclusion_probabilities(weights, counts, wanted=6)
    assert np.add.reduceat(probabilities, counts.cumsum() - counts) == pytest.approx([6, 3, 6, 1])
    generator, draws, hits = torch.Generator().manual_seed(0), 4000, np.zeros(len(weights))
    for _ in range(draws):
        chosen = systematic_draw(probabilities, counts, generator)
        assert len(np.unique(chosen)) == len(chosen) == 16
        hits[chosen] += 1
    error = np.sqrt(probabilities * (1 - probabilities) / draws)
    assert (np.abs(hits / draws - probabilities) <= 4.5 * error + 1e-9).all()
