"""unbiased: the mean of many draws is the full gradient, and what the paper writes for more than one chunk is not."""

import pytest
import torch

import setstream as ss
from setstream import testing
from setstream.errors import ConfigurationError, LawViolation
from setstream.testing.gradients import default_loss
from tests.gradients.builders import SETS, check_unbiased, make, model, ragged_chunks


@pytest.mark.parametrize(("grad_chunks", "replacement"), [(1, False), (2, False), (3, False), (2, True), (3, True)])
def test_unbiased(grad_chunks, replacement):
    """Sets of 40, 23 and 9 in chunks of 8: different numbers of chunks, and unequal ones; residual and layer norm on."""
    check_unbiased(model(), chunk_size=8, partition="random", grad_chunks=grad_chunks, replacement=replacement)


@pytest.mark.parametrize(
    "pool", [ss.DeepSets("max"), ss.Parallel(a=ss.UMBC(8, 2), b=ss.DeepSets("min"))], ids=["max", "parallel"]
)
@pytest.mark.parametrize("grad_chunks", [1, 2])
def test_unbiased_for_extremes(pool, grad_chunks):
    check_unbiased(make(pool), chunk_size=8, partition="random", grad_chunks=grad_chunks)


def test_unbiased_with_a_given_partition():
    partition = [[list(range(30)), list(range(30, 40))], [[*range(0, 23, 2)], [*range(1, 23, 2)]], [[*range(9)]]]
    testing.check_unbiased_gradient(model(), SETS, draws=500, partition=partition)


def reference_estimate(scale_output, decoder_weight):
    """The estimator as the paper's equations have it, for any number of sampled chunks, written plainly."""

    def estimate(subject, sets, generator):
        encoder, wanted, chunk_size = subject.encoder, 2, 8
        zs, weights = [], []
        for x in sets:
            chunks = x[torch.randperm(len(x), generator=generator)].split(chunk_size)
            taken = set(torch.randperm(len(chunks), generator=generator)[:wanted].tolist())
            state = encoder.empty(1)
            for index, chunk in enumerate(chunks):
                part = encoder.update(None, chunk[None])
                state = state + (part if index in taken else part.detach())
            zs.append(encoder.finalize(state))
            weights.append(max(len(chunks) / wanted, 1.0))
        z = torch.cat(zs)
        if scale_output:  # the factor on the encoder's output instead of on the state
            factor = torch.tensor(weights)[:, None, None]
            z = z * factor + (z * (1 - factor)).detach()
        value = default_loss(subject.head(z))
        learned = dict(subject.named_parameters())
        found = torch.autograd.grad(value, list(learned.values()), allow_unused=True)
        scaled = {}
        for (name, p), g in zip(learned.items(), found, strict=True):
            g = torch.zeros_like(p) if g is None else g
            scaled[name] = g * decoder_weight if name.startswith("head") else g
        return scaled

    return estimate


# The bias of both is systematic: parameters after the pool have no noise, so that few draws show it.
def test_the_papers_decoder_weight_is_biased_for_two_chunks():
    with pytest.raises(LawViolation, match="the mean for head"):
        subject = model()
        for p in subject.encoder.parameters():
            p.requires_grad_(False)
        frozen = reference_estimate(scale_output=False, decoder_weight=0.5)
        testing.check_unbiased_gradient(subject_with_grad(subject), SETS, draws=50, estimate=only_head(frozen))


def subject_with_grad(subject):
    subject.head.requires_grad_(True)
    return subject


def only_head(estimate):
    def run(subject, sets, generator):
        subject.encoder.requires_grad_(True)
        found = estimate(subject, sets, generator)
        subject.encoder.requires_grad_(False)
        return {name: g for name, g in found.items() if name.startswith("head")}

    return run


def test_scaling_the_output_is_biased_with_a_slot_residual():
    with pytest.raises(LawViolation, match="the mean for encoder"):
        testing.check_unbiased_gradient(
            model(), SETS, draws=50, estimate=reference_estimate(scale_output=True, decoder_weight=1.0)
        )


def test_with_replacement_extremes_are_refused():
    with pytest.raises(ConfigurationError, match="biased for a maximum or minimum"):
        ss.encode(make(ss.DeepSets("max")), SETS, replacement=True)


def test_gaussian_slots_in_training_are_unbiased_around_their_draw():
    """With a fixed draw, chunk sampling is the only noise; its mean is the gradient at that draw."""
    encoder = make(ss.UMBC(8, 3, slots="gaussian")).double().train()
    sets = [x.double() for x in SETS]

    def gradient(mode, generator=None, **options):
        torch.manual_seed(11)  # the slots' draw
        z = ss.encode(encoder, sets, gradient=mode, chunk_size=8, generator=generator, **options)
        return torch.autograd.grad(default_loss(z), [encoder.pool.slots.raw_std, encoder.phi[0].weight])

    full = gradient("exact")
    again = gradient("unbiased", grad_chunks=99)
    for a, b in zip(full, again, strict=True):
        torch.testing.assert_close(a, b)


def test_a_source_is_unbiased():
    check_unbiased(make(), read=lambda sets: ss.Chunks(ragged_chunks(sets, 8)), grad_chunks=2)


@pytest.mark.parametrize("pool", ["max", "min"])
def test_a_maximum_over_a_source_whose_chunks_lack_some_sets(pool):
    encoder = make(ss.DeepSets(pool))
    long, short = torch.randn(50, 3), torch.randn(9, 3)
    pieces = [[long[i : i + 10], short[i : i + 10]] for i in range(0, 50, 10)]
    for _ in range(6):
        z = ss.encode(encoder, ss.Chunks(pieces), gradient="unbiased")
        torch.testing.assert_close(z, encoder([long, short]))
        z.sum().backward()
        assert all(torch.isfinite(p.grad).all() for p in encoder.phi.parameters())
