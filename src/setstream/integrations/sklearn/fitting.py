"""How the estimators train: batches of sets through `ss.encode`, Adam with a cosine, early stopping on request.

    loss = Σ_i w_i loss_i / n          over the sets of a batch of n; loss_i: the mean over the streams; weights of mean one
    loss_i of halves a, b of a set     -log( e^(a_i·b_i / τ) / Σ_j e^(a_i·b_j / τ) ), and the same from b_i to the a_j; a, b of
                                       length one (InfoNCE)

Sets of at most chunk_size elements are encoded at once. Larger sets are encoded in chunks, and gradient="auto"
then is "exact": the same gradient in the memory of a chunk.
"""

import copy
import math
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor

from setstream.integrations.sklearn.network import StreamsHead
from setstream.integrations.sklearn.sets import Sources
from setstream.models.model import SetModel
from setstream.models.stream import evaluating
from setstream.sets.partition import runs
from setstream.sets.source import ArraySource, PartSource, SetSource
from setstream.training.checkpoint import make_optimizer
from setstream.training.config import TrainConfig
from setstream.training.record import Progress
from setstream.training.task import Encode, in_epochs, seed_step

#: (model, encode, sets, their targets) -> the loss of each set, (B,)
Loss = Callable[[SetModel, Encode, Sources, Tensor], Tensor]
HeldOut = tuple[Sources, Tensor]
TOLERANCE = 1e-4  # smaller changes of the held-out loss do not count
TEMPERATURE = 0.1  # τ of the loss between halves


def encode_sets(model: SetModel, encode: Encode, sets: Sources) -> Any:
    """z of a batch of sources, together where they are small, else chunk by chunk; gradient "auto" is then full, or exact."""
    small = sum(map(len, sets)) <= encode.chunk_size * len(sets)
    gradient = encode.gradient if encode.gradient != "auto" else "full" if small else "exact"
    given = [one.tensor().to(model.encoder.device, torch.float32) for one in sets] if small else sets
    return replace(encode, gradient=gradient)(model.encoder, given)


def output_rows(model: SetModel, encode: Encode, sets: Sources) -> Tensor:
    """One row of outputs per stream, (B, S, outputs)."""
    return cast(StreamsHead, model.head).streams(encode_sets(model, encode, sets))


class Training:
    """A model in training: everything that a later call needs to continue; `title` None: without showing progress."""

    def __init__(self, model: SetModel, config: TrainConfig, encode: Encode, loss: Loss, title: str | None) -> None:
        self.model, self.config, self.encode, self.loss, self.title = model, config, encode, loss, title
        self.device = next(model.parameters()).device
        self.optimizer = make_optimizer(model, config, self.device)
        self.step = 0

    def run(
        self, sets: Sources, targets: Tensor, weights: Tensor, steps: int, held_out: HeldOut | None = None, patience: int = 0
    ) -> tuple[list[float], list[float]]:
        """Take `steps` steps on these sets; returns the mean loss of each epoch, and the loss of the sets held out after it.

        With sets held out, ends with the weights that do best on them, and stops after `patience` epochs without improvement.
        """
        size, first = min(self.config.batch, len(sets)), self.step
        epoch = math.ceil(len(sets) / size)
        losses, tests, summed, best, lowest, waited = [], [], 0.0, None, math.inf, 0
        self.model.train()
        with Progress(steps, self.title or "", shown=self.title is not None, every=epoch) as progress:
            for number in range(1, steps + 1):
                seed_step(self.config.seed, self.step, 0, self.device)
                for group in self.optimizer.param_groups:
                    group["lr"] = self.config.rate(self.step)
                picked = in_epochs(number - 1, size, len(sets), self.config.seed, first)
                each = self.loss(self.model, self.encode, [sets[i] for i in picked], targets[picked].to(self.device))
                loss = (each * weights[picked].to(each)).mean()
                self.optimizer.zero_grad()
                loss.backward()
                self.optimizer.step()
                self.step += 1
                summed += loss.item()
                progress.update(number, loss.item())
                if number % epoch and number != steps:
                    continue
                losses.append(summed / ((number - 1) % epoch + 1))
                summed = 0.0
                if held_out is not None:
                    tests.append(self._test(*held_out))
                    waited += 1
                    if tests[-1] < lowest - TOLERANCE:
                        lowest, waited, best = tests[-1], 0, copy.deepcopy(self.model.state_dict())
                    if waited >= patience:
                        break
        if best is not None:
            self.model.load_state_dict(best)
        self.model.eval()
        return losses, tests

    def _test(self, sets: Sources, targets: Tensor) -> float:
        total = 0.0
        with evaluating(self.model):
            for batch in batches(sets, self.encode.chunk_size):
                total += float(self.loss(self.model, self.encode, sets[batch], targets[batch].to(self.device)).sum())
        return total / len(sets)


def batches(sets: Sources, chunk_size: int) -> Iterator[slice]:
    """Batches of at most 64 consecutive sets and eight chunks of elements."""
    return runs(map(len, sets), 8 * chunk_size, 64)


def class_loss(model: SetModel, encode: Encode, sets: Sources, target: Tensor) -> Tensor:
    """The cross-entropy of each set, averaged over its streams: (B,)."""
    logits = output_rows(model, encode, sets)  # (B, S, K)
    streams = logits.shape[1]
    each = F.cross_entropy(logits.flatten(0, 1), target.repeat_interleave(streams), reduction="none")
    return each.view(-1, streams).mean(1)


def square_loss(model: SetModel, encode: Encode, sets: Sources, target: Tensor) -> Tensor:
    """The squared error of each set, averaged over its streams and outputs: (B,)."""
    outputs = output_rows(model, encode, sets)  # (B, S, K)
    return (outputs - target.unsqueeze(1)).square().mean((1, 2))


def halves(one: SetSource, chunk_size: int) -> tuple[SetSource, SetSource]:
    """Two random halves of a set; of a set too large for memory, the first and the second half. A single element is both."""
    size = len(one)
    if size < 2:
        return one, one
    if size > chunk_size:
        return PartSource(one, 0, 2), PartSource(one, 1, 2)
    order, elements = torch.randperm(size), one.tensor()
    return ArraySource(elements[order[: size // 2]]), ArraySource(elements[order[size // 2 :]])


def contrast_loss(model: SetModel, encode: Encode, sets: Sources, target: Tensor) -> Tensor:
    """InfoNCE between the halves of the sets of a batch, in both directions: (B,)."""
    pairs = [halves(one, encode.chunk_size) for one in sets]
    rows = output_rows(model, encode, [one for one, _ in pairs] + [other for _, other in pairs])[:, -1]
    a, b = F.normalize(rows, dim=-1).split(len(sets))
    logits = a @ b.T / TEMPERATURE
    number = torch.arange(len(sets), device=logits.device)
    return (F.cross_entropy(logits, number, reduction="none") + F.cross_entropy(logits.T, number, reduction="none")) / 2
