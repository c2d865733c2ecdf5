"""Models of a user's own, as a module of theirs would build them."""

import torch

import setstream as ss
from setstream.tasks.clustering import Clustering


def build(width=8, slots=2):
    encoder = build_encoder(width, slots)
    return ss.SetModel(encoder, ss.nn.SetTransformer(width, out_dim=3))


def build_encoder(width=8, slots=2):
    return ss.SetEncoder(torch.nn.Linear(2, width), ss.UMBC(width, num_slots=slots))


def build_with_values():
    """A model whose builder looks at numbers, which torch's meta device does not have."""
    model = build()
    assert model.encoder.phi.weight.sum().item() != 0
    return model


def flat(side):
    """A backbone."""
    net = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(3 * side * side, 4))
    net.out_dim = 4
    return net


class Marks(Clustering):
    """A task that says when it is built."""

    def __init__(self):
        raise RuntimeError("built")
