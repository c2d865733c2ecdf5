"""Random numbers that depend on the seed, the step and the rank alone.

No state of a generator has to be saved, and a run that is resumed at step n, on any number of processes, draws the numbers that
it would have drawn without stopping.
"""

import torch

from setstream.gradients.base import generators


def mix(*numbers: int) -> int:
    """One well-mixed 63-bit seed of several numbers (the finaliser of SplitMix64, applied to each in turn)."""
    state = 0
    for number in numbers:
        state = (state + number + 0x9E3779B97F4A7C15) % 2**64
        state = ((state ^ (state >> 30)) * 0xBF58476D1CE4E5B9) % 2**64
        state = ((state ^ (state >> 27)) * 0x94D049BB133111EB) % 2**64
        state ^= state >> 31
    return state >> 1


def in_epochs(step: int, size: int, total: int, *seed: int) -> list[int]:
    """The indices of a step's batch among `total` items; each item comes once per epoch, in a new order each time."""
    numbers = range(step * size, (step + 1) * size)
    orders = {
        epoch: torch.randperm(total, generator=torch.Generator().manual_seed(mix(*seed, epoch, 5)))
        for epoch in {number // total for number in numbers}
    }
    return [int(orders[number // total][number % total]) for number in numbers]


def seed_step(seed: int, step: int, rank: int, device: torch.device) -> None:
    """Set the generators that modules draw from (dropout, slots, partitions) for one step of one rank."""
    for generator in generators(device):
        generator.manual_seed(mix(seed, step, rank, 1))
