"""How the estimators train: batches of sets through `ss.encode`, Adam with a cosine, early stopping where asked for.

    loss = Σ_i w_i loss_i / n          over the sets of a batch of n; loss_i: the mean over the streams; weights of mean one

Where a batch's elements fit chunk_size a set they are encoded at once. Larger sets go through in chunks, and gradient="auto"
then is "exact": the same gradient in the memory of a chunk.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from setstream.integrations.sklearn.network import StreamsHead
from setstream.integrations.sklearn.sets import Sources, naming_the_set
from setstream.models.model import SetModel
from setstream.models.stream import evaluating
from setstream.training.config import TrainConfig
from setstream.training.optimizer import make_optimizer
from setstream.training.progress import Progress
from setstream.training.seeds import in_epochs, seed_step
from setstream.training.task import Encode

#: (model, encode, sets, their targets) -> the loss of each set, (B,)
Loss = Callable[[SetModel, "SetsEncode", Sources, Tensor], Tensor]
# Smaller changes of the held-out loss are none.
TOLERANCE = 1e-4


class SetsEncode:
    """z of a batch of sources: together where they are small, chunk by chunk where not."""

    def __init__(self, gradient: str, chunk_size: int, grad_chunks: int) -> None:
        self.gradient, self.chunk_size, self.grad_chunks = gradient, chunk_size, grad_chunks

    def __call__(self, model: SetModel, sets: Sources) -> Any:
        """What the pool gives for the sets."""
        small = sum(map(len, sets)) <= self.chunk_size * len(sets)
        gradient = self.gradient if self.gradient != "auto" else "full" if small else "exact"
        home = model.encoder.device
        given: Any = sets
        if small:
            given = [one.tensor().to(home, torch.float32) for one in sets]
        return Encode(gradient, self.chunk_size, self.grad_chunks)(model.encoder, given)


@dataclass
class History:
    """What a fit went through: the mean loss of each epoch, and that of the held-out sets."""

    losses: list[float] = field(default_factory=list)
    held_out: list[float] = field(default_factory=list)


@dataclass
class Training:
    """A model in training: everything that a later call needs to go on."""

    model: SetModel
    config: TrainConfig
    encode: SetsEncode
    loss: Loss
    optimizer: torch.optim.Optimizer
    step: int = 0

    @classmethod
    def start(cls, model: SetModel, config: TrainConfig, encode: SetsEncode, loss: Loss, device: torch.device) -> Training:
        """On a device, at step zero."""
        return cls(model.to(device), config, encode, loss, make_optimizer(model, config, device))

    def run(
        self,
        sets: Sources,
        targets: Tensor,
        weights: Tensor,
        steps: int,
        *,
        held_out: tuple[Sources, Tensor] | None = None,
        patience: int = 10,
        verbose: int = 0,
        title: str = "",
    ) -> History:
        """So many steps on these sets; with sets held out, until their loss has not fallen for `patience` epochs."""
        device = self.optimizer.param_groups[0]["params"][0].device
        size = min(self.config.batch, len(sets))
        epoch = -(-len(sets) // size)
        history, best, waited, summed = History(), None, 0, 0.0
        lowest = float("inf")
        self.model.train()
        with Progress(steps, title, shown=bool(verbose), every=epoch) as progress:
            for own in range(steps):
                seed_step(self.config.seed, self.step, 0, device)
                for group in self.optimizer.param_groups:
                    group["lr"] = self.config.rate(self.step)
                picked = in_epochs(own, size, len(sets), self.config.seed, self.step - own)
                each = self.loss(self.model, self.encode, [sets[i] for i in picked], targets[picked].to(device))
                loss = (each * weights[picked].to(each)).mean()
                self.optimizer.zero_grad()
                loss.backward()
                self.optimizer.step()
                self.step += 1
                summed += loss.item()
                progress.update(own + 1, loss.item())
                if (own + 1) % epoch and own + 1 < steps:
                    continue
                history.losses.append(summed / ((own % epoch) + 1))
                summed = 0.0
                if held_out is None:
                    continue
                history.held_out.append(self.test(*held_out))
                waited += 1
                if history.held_out[-1] < lowest - TOLERANCE:
                    lowest, waited, best = history.held_out[-1], 0, copy.deepcopy(self.model.state_dict())
                if waited >= patience:
                    break
        if best is not None:
            self.model.load_state_dict(best)
        self.model.eval()
        return history

    def test(self, sets: Sources, targets: Tensor) -> float:
        """The mean loss of sets that are not trained on."""
        total = 0.0
        with evaluating(self.model):
            for start, own in batches(sets, self.encode.chunk_size):
                target = targets[start : start + len(own)]
                total += float(self.loss(self.model, self.encode, own, target.to(self.model.encoder.device)).sum())
        return total / len(sets)


def rows_of(model: SetModel) -> Callable[[Any], Tensor]:
    """From what the model's pools give to a row of outputs a stream, (B, S, outputs)."""
    head = model.head
    assert isinstance(head, StreamsHead)
    return head.streams


def batches(sets: Sources, chunk_size: int, most: int = 64) -> Iterator[tuple[int, Sources]]:
    """Sets in their order, as many at a time as have up to eight chunks of elements together: where they start, and they."""
    start, own, size = 0, Sources(), 0
    for number, one in enumerate(sets):
        if own and (size + len(one) > 8 * chunk_size or len(own) >= most):
            yield start, own
            start, own, size = number, Sources(), 0
        own.append(one)
        size += len(one)
    yield start, own


def outputs_of(model: SetModel, sets: Sources, chunk_size: int, change: Callable[[Any], Tensor]) -> Tensor:
    """change(z) of every set, in eval mode, on the CPU."""
    encode = SetsEncode("none", chunk_size, 1)
    with evaluating(model), naming_the_set(sets, chunk_size):
        return torch.cat([change(encode(model, own)).cpu() for _, own in batches(sets, chunk_size)])
