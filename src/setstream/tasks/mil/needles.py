"""Needle bags: real images, of which a few in a thousand decide the label.

    bag       N images of CIFAR-10, log N uniform between log 500 and log 4000; of some classes (vehicles)
    positive  max(1, round(rate · N)) of them, at random places, are of one other class, the needle (frogs)
    images    training bags from the first 40,000, validation bags from the next 10,000, test bags from the test images

Bag i of a split is a function of the seed and i, and is put together when it is asked for: bags take no memory. The bags of all
rates have the same sizes and the same other images.

Where the backbone comes from: `OtherClasses` trains it to tell the nine classes apart that are no needles, on the first 40,000
images. It has never seen a needle.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from copy import copy
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from setstream.data.images import Images, cifar10
from setstream.errors import ConfigurationError
from setstream.models.encoder import SetEncoder
from setstream.models.model import SetModel
from setstream.nn.backbones import Backbone
from setstream.nn.backbones import backbone as named_backbone
from setstream.nn.backbones.small import small
from setstream.pools import DeepSets
from setstream.tasks.mil.bags import Bags
from setstream.tasks.mil.models import phi_of
from setstream.tasks.mil.task import Bag, Mil
from setstream.training.seeds import mix
from setstream.training.task import Batch, Encode, Task

SMALLEST, LARGEST = 500, 4000
SIDE, CLASSES = 32, 10
NEEDLE, OTHERS = 6, (0, 1, 8, 9)
TRAIN_IMAGES, VALIDATION_IMAGES = 40_000, 10_000
# Images that the backbone knows, none of them a needle: they say where its features lie and how far they spread.
KNOWN_IMAGES = 4000


def splits() -> dict[str, Images]:
    """CIFAR-10 in three parts: train, val and test."""
    images = cifar10()
    ends = TRAIN_IMAGES, TRAIN_IMAGES + VALIDATION_IMAGES
    return {"train": images["train"].part(0, ends[0]), "val": images["train"].part(*ends), "test": images["test"]}


def check_classes(needle: int, others: Sequence[int]) -> None:
    """The needle and the others must be classes of CIFAR-10, and the needle none of the others."""
    if not {needle, *others} <= set(range(CLASSES)) or needle in others or not others:
        raise ConfigurationError(
            f"the needle and the others are classes 0 .. {CLASSES - 1}, and the needle is none of the others; got {needle} and "
            f"{list(others)}"
        )


class NeedleBags(Sequence[Tensor]):
    """Bags of some images, or of their features, made when they are asked for; odd ones are positive.

    >>> images = Images(torch.arange(100).view(100, 1), torch.arange(100) % 10)
    >>> bags = NeedleBags(images.pixels, images.classes, count=4, needle=3, others=(0, 1, 2), rate=0.01, seed=0)
    >>> [int((bag % 10 == 3).sum()) == max(1, round(0.01 * len(bag))) * (i % 2) for i, bag in enumerate(bags)]
    [True, True, True, True]
    """

    def __init__(
        self,
        elements: Tensor,
        classes: Tensor,
        *,
        count: int,
        needle: int = NEEDLE,
        others: Sequence[int] = OTHERS,
        rate: float,
        seed: int,
    ) -> None:
        check_classes(needle, others)
        if not 0 < rate < 1:
            raise ConfigurationError(f"the rate of needles lies between 0 and 1; got {rate}")
        self.elements, self.total, self.rate, self.seed = elements, count, rate, seed
        self.needles, self.others = ((torch.isin(classes, torch.tensor(own))).nonzero().flatten() for own in ([needle], others))

    def __len__(self) -> int:
        return self.total

    def __getitem__(self, number: Any) -> Any:
        if not 0 <= number < self.total:
            raise IndexError(number)
        generator = torch.Generator().manual_seed(mix(self.seed, number, 13))
        share = float(torch.rand((), generator=generator))
        size = round(SMALLEST * (LARGEST / SMALLEST) ** share)
        chosen = self.others[torch.randint(len(self.others), (size,), generator=generator)]
        if number % 2:
            wanted = max(1, round(self.rate * size))
            places = torch.randperm(size, generator=generator)[:wanted]
            chosen[places] = self.needles[torch.randint(len(self.needles), (wanted,), generator=generator)]
        return self.elements[chosen]

    def of(self, elements: Tensor) -> NeedleBags:
        """The same bags of something else, such as the images' features."""
        other = copy(self)
        other.elements = elements
        return other

    @property
    def labels(self) -> Tensor:
        """0, 1, 0, 1 ..."""
        return torch.arange(self.total) % 2


class Needles(Mil):
    """Bags of 500 to 4,000 images, positive when a few of them are of one class.

    rate:       the share of needles in a positive bag, 0.001 to 0.005; at least one.
    needle:     the class that counts: 0 airplane, 1 automobile, 2 bird, 3 cat, 4 deer, 5 dog, 6 frog, 7 horse, 8 ship, 9 truck.
    others:     the classes of all other images.
    train_bags, val_bags, test_bags:  how many there are; half of them are positive. bag_seed: which ones.
    features:   the weights of a backbone (`small`): bags of its features instead of pixels, to train a head on alone.
    """

    name = "needles"
    summary = "bags of 500 to 4,000 CIFAR-10 images, a few in a thousand decide (accuracy, AUROC, F1)"
    report = "setstream.tasks.mil.report:add_evidence"

    def __init__(
        self,
        rate: float = 0.003,
        needle: int = NEEDLE,
        others: Sequence[int] = OTHERS,
        train_bags: int = 2000,
        val_bags: int = 500,
        test_bags: int = 1000,
        bag_seed: int = 0,
        features: str | None = None,
        test_chunk: int = 256,
    ) -> None:
        self.repeat, self.test_chunk, self.weights = bag_seed, test_chunk, (1.0, 1.0)
        images = splits()
        elements = {name: part.pixels for name, part in images.items()}
        self.known = images["train"].pixels[images["train"].classes != needle][:KNOWN_IMAGES]
        if features is not None:
            net = small(features).eval()
            net.standardise(self.known)
            elements = {name: _features(net, pixels) for name, pixels in elements.items()}
        found = {}
        for turn, (name, count) in enumerate((("train", train_bags), ("val", val_bags), ("test", test_bags))):
            own = NeedleBags(
                elements[name],
                images[name].classes,
                count=count,
                needle=needle,
                others=others,
                rate=rate,
                seed=mix(bag_seed, turn),
            )
            found[name] = Bags(own, own.labels)
        self.train, self.validation, self.test = found["train"], found["val"], found["test"]

    def build(self, model: str, **options: Any) -> SetModel:
        """One of the models; the features of its backbone, if it has one, are standardised by images without needles."""
        built = super().build(model, **options)
        for module in built.modules():
            if isinstance(module, Backbone):
                module.standardise(self.known)
        return built

    def probabilities(self, model: SetModel, bags: Sequence[Bag]) -> Tensor:
        """Of each bag to be positive. Bags share their images: each of those goes through a backbone once."""
        phi = model.encoder.phi
        if isinstance(bags, NeedleBags) and isinstance(phi, nn.Sequential) and isinstance(phi[0], Backbone):
            bags = bags.of(_features(phi[0], bags.elements.to(model.encoder.device)).cpu())
            model = SetModel(SetEncoder(phi[1:], model.encoder.pool), model.head).eval()
        return super().probabilities(model, bags)


@torch.no_grad()
def _features(net: nn.Module, pixels: Tensor) -> Tensor:
    return torch.cat([net(part) for part in pixels.split(1000)])


class OtherClasses(Task):
    """Tell the nine classes that are no needles apart, an image a set: where the backbone of the needle bags comes from.

    needle: the class that is left out.
    """

    name = "other-classes"
    summary = "CIFAR-10 without one class, an image a set: a backbone for needle bags (accuracy)"

    @staticmethod
    def _classifier(backbone: str = "small", backbone_options: dict[str, Any] | None = None) -> SetModel:
        """A backbone and a linear layer."""
        net = named_backbone(backbone, **(backbone_options or {}))
        out_dim = net.out_dim
        assert isinstance(out_dim, int)
        encoder = SetEncoder(phi_of(net, nn.Identity()), DeepSets("mean"), cast_input=False)
        return SetModel(encoder, nn.Linear(out_dim, CLASSES))

    models: ClassVar[dict[str, Callable[..., SetModel]]] = {"linear": _classifier}

    def __init__(self, needle: int = NEEDLE) -> None:
        self.parts = {
            name: Images(own.pixels[own.classes != needle], own.classes[own.classes != needle])
            for name, own in splits().items()
        }

    def batch(self, step: int, size: int, generator: torch.Generator) -> Batch:
        """Random images, half of them mirrored, all of them shifted by up to four pixels."""
        own = self.parts["train"]
        chosen = torch.randint(len(own.classes), (size,), generator=generator)
        pixels = F.pad(own.pixels[chosen].float(), (4, 4, 4, 4), mode="reflect").to(torch.uint8)
        left, top = torch.randint(0, 9, (2, size), generator=generator)
        mirrored = torch.rand(size, generator=generator) < 0.5
        columns = left[:, None] + torch.where(mirrored[:, None], torch.arange(SIDE - 1, -1, -1), torch.arange(SIDE))
        rows = top[:, None] + torch.arange(SIDE)
        picked = pixels[torch.arange(size)[:, None, None], :, rows[:, :, None], columns[:, None, :]]  # (B, 32, 32, 3)
        return {"images": picked.permute(0, 3, 1, 2).unsqueeze(1), "class": own.classes[chosen]}

    def loss(self, model: SetModel, batch: Batch, encode: Encode) -> Tensor:
        """Cross-entropy."""
        return F.cross_entropy(model.head(encode(model.encoder, batch["images"])), batch["class"])

    def evaluate(self, model: SetModel, *, quick: bool = False) -> dict[str, float]:
        """Accuracy on validation images; at the end, on test images."""
        own, home = self.parts["val" if quick else "test"], model.encoder.device
        with torch.no_grad():
            logits = torch.cat([model(part.unsqueeze(1).to(home)).cpu() for part in own.pixels.split(1000)])
        accuracy = float((logits.argmax(1) == own.classes).double().mean())
        return {"accuracy": accuracy, "error": 1 - accuracy}
