"""How the estimators train: batches of sets through `ss.encode`, Adam with a cosine, early stopping on request.

    loss = Σ_i w_i loss_i / n          over the sets of a batch of n; loss_i: the mean over the streams; weights of mean one
    loss_i of halves a, b of a set     -log( e^(a_i·b_i / τ) / Σ_j e^(a_i·b_j / τ) ), and the same from b_i to the a_j; a, b of
                                       length one (InfoNCE)

Sets of at most chunk_size elements are encoded at once. Larger sets are encoded in chunks, and gradient="auto"
then is "exact": the same gradient in the memory of a chunk. Of sets with more than `MOST` elements, a step with gradient="auto"
reads so many at random.
"""

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
from setstream.sets.partition import runs
from setstream.sets.source import ArraySource, PartSource, SetSource
from setstream.training.checkpoint import make_optimizer
from setstream.training.config import TrainConfig
from setstream.training.record import Progress
from setstream.training.task import Encode, in_epochs, seed_step

#: (model, encode, sets, their targets) -> the loss of each set, (B,)
Loss = Callable[[SetModel, Encode, Sources, Tensor], Tensor]
MOST = 8192  # elements of a set in a step
TOLERANCE = 1e-4  # smaller changes of the held-out loss do not count
TEMPERATURE = 0.1  # τ of the loss between halves


def encode_sets(model: SetModel, encode: Encode, sets: Sources) -> Any:
    """z of a batch of sources, together where they are small, else chunk by chunk; gradient "auto" is then full, or exact."""
    small = sum(map(len, sets)) <= encode.chunk_size * len(sets)
    gradient = encode.gradient if encode.gradient != "auto" else "full" if small else "exact"
    given = [one.tensor().to(model.encoder.device, torch.float32) for one in sets] if small else sets
    return replace(encode, gradient=gradient)(model.encoder, given)


def sampled(one: SetSource, generator: torch.Generator = torch.default_generator) -> SetSource:
    """`MOST` random elements of a set that has more."""
    if len(one) <= MOST:
        return one
    places = torch.randperm(len(one), generator=generator)[:MOST].sort().values
    return ArraySource(one.take(places), one.id, one.label, one.metadata)


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

    def run(self, sets: Sources, targets: Tensor, weights: Tensor, steps: int) -> list[float]:
        """Take `steps` steps on these sets; returns the mean loss of each epoch."""
        size, first = min(self.config.batch, len(sets)), self.step
        epoch = math.ceil(len(sets) / size)
        losses, summed = [], 0.0
        self.model.train()
        with Progress(steps, self.title or "", shown=self.title is not None, every=epoch) as progress:
            for number in range(1, steps + 1):
                seed_step(self.config.seed, self.step, 0, self.device)
                for group in self.optimizer.param_groups:
                    group["lr"] = self.config.rate(self.step)
                picked = in_epochs(number - 1, size, len(sets), self.config.seed, first)
                given = [sampled(sets[i]) if self.encode.gradient == "auto" else sets[i] for i in picked]
                each = self.loss(self.model, self.encode, given, targets[picked].to(self.device))
                loss = (each * weights[picked].to(each)).mean()
                self.optimizer.zero_grad()
                loss.backward()
                self.optimizer.step()
                self.step += 1
                summed += loss.item()
                progress.update(number, loss.item())
                if number % epoch == 0 or number == steps:
                    losses.append(summed / ((number - 1) % epoch + 1))
                    summed = 0.0
        self.model.eval()
        return losses


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
