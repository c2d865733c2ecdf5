"""Models of a user's own, as a module of theirs would build them."""

import torch

import setstream as ss


def build(width=8, slots=2):
    encoder = build_encoder(width, slots)
    return ss.SetModel(encoder, ss.nn.SetTransformer(width, out_dim=3))


def build_encoder(width=8, slots=2):
    return ss.SetEncoder(torch.nn.Linear(2, width), ss.UMBC(width, num_slots=slots))
