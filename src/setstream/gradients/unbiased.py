"""unbiased: only m' drawn chunks of each set carry the gradient, weighted so that the expectation is the full gradient.

    ∂L/∂θ ≈ Σ_drawn C/m' · ∂L/∂state · ∂absorb(phi(chunk))/∂θ          (Willette et al. 2023, corrected: docs/gradients.md)

The drawn chunks are few, so their graph is made at once. The forward pass need not read them one by one: it reads memory in its
order, through views. The exception is where the backward pass must know what a block did in the forward pass: where phi draws
random numbers, or a single element owns an entry of the state (a maximum).
"""

from typing import Any

import torch

from setstream.gradients.base import Pass, drawing, graded_tensors
from setstream.gradients.exact import Recomputation
from setstream.gradients.protocol import Batch, Options
from setstream.models.encoder import SetEncoder
from setstream.states.accumulators import align


def unbiased(encoder: SetEncoder, sets: Batch, options: Options) -> Any:
    """z of all elements, with the gradient of the drawn chunks."""
    run = Pass(encoder, sets, options)
    apart = run.owned or run.draws_numbers(sets.sample)
    with drawing:
        size = run.forward_size(sets)
        blocks, carriers = sets.draw(options.grad_chunks, options.replacement, size, apart)
    with torch.no_grad():
        forward = run.forward(blocks)
    if options.group is not None:  # no graph crosses ranks
        return run.encode(forward, Recomputation(run, forward, carriers))
    tensors = graded_tensors(forward.state)
    for index, block, factor in carriers:
        chunk = encoder.absorb(run.empty, run.prepared, block, run.features(index, block.elements))
        for name, part in forward.contributions(index, chunk).items():
            weight = 1.0 if factor is None else align(factor.to(part), part)
            tensors[name] = tensors[name] + (part - part.detach()) * weight
    return run.finalize(forward.state, tensors)
