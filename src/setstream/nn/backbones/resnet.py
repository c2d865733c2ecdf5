"""ResNet18 with instance norm, followed by the projection of SimCLR.

    x --conv 7x7 /2, norm, ReLU, max pool /2--> 4 stages of 2 blocks --mean of the plane--> 8·width --l1, ReLU, l2--> projection
    block(x) = ReLU( norm(conv(ReLU(norm(conv x)))) + shortcut(x) )

width is 64, so there are 512 features; norm is an instance norm without weights, which looks at one image alone. He et al.,
"Deep Residual Learning for Image Recognition", CVPR 2016; with instance norm in Li et al., "Dual-stream Multiple Instance
Learning Network", CVPR 2021, whose published SimCLR checkpoints name their tensors

    features.0.weight                       the first convolution            stem.weight
    features.S.B.conv1.weight               S = 4 .. 7, B = 0, 1             stages.(S-4).B.conv1.weight
    features.S.0.downsample.0.weight        where the plane shrinks          stages.(S-4).0.shortcut.weight
    l1.weight, l1.bias, l2.weight, l2.bias  the projection                   projection.0.*, projection.2.*
"""

from itertools import pairwise
from pathlib import Path

import torch.nn.functional as F
from torch import Tensor, nn

from setstream.errors import ShapeError
from setstream.models.weights import load_tensors
from setstream.nn.backbones.base import Backbone, read_checkpoint

WIDTH, PROJECTED = 64, 256
RENAMED = {"features.0.": "stem.", ".downsample.0.": ".shortcut.", "l1.": "projection.0.", "l2.": "projection.2."}
RENAMED |= {f"features.{stage + 4}.": f"stages.{stage}." for stage in range(4)}


class Block(nn.Module):
    """Two 3x3 convolutions and a shortcut."""

    def __init__(self, in_dim: int, out_dim: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(in_dim, out_dim, 3, stride, padding=1, bias=False)
        self.conv2 = nn.Conv2d(out_dim, out_dim, 3, padding=1, bias=False)
        self.shortcut = nn.Conv2d(in_dim, out_dim, 1, stride, bias=False) if stride > 1 or in_dim != out_dim else None

    def forward(self, x: Tensor) -> Tensor:
        inner = F.instance_norm(self.conv2(F.relu(F.instance_norm(self.conv1(x)))))
        return F.relu(inner + (x if self.shortcut is None else F.instance_norm(self.shortcut(x))))


class ResNet18(nn.Module):
    """From images (n, 3, H, W) to (n, 8 width), or to (n, projection)."""

    SMALLEST = 33  # below, the last stage has one place only, and an instance norm of one number is zero

    def __init__(self, width: int = WIDTH, projection: int | None = PROJECTED) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, width, 7, 2, padding=3, bias=False)
        widths = [width, width, 2 * width, 4 * width, 8 * width]
        self.stages = nn.ModuleList(
            nn.Sequential(Block(before, after, 1 if stage == 0 else 2), Block(after, after, 1))
            for stage, (before, after) in enumerate(pairwise(widths))
        )
        self.projection: nn.Module = nn.Identity()
        if projection is not None:
            self.projection = nn.Sequential(nn.Linear(8 * width, 8 * width), nn.ReLU(), nn.Linear(8 * width, projection))

    def forward(self, x: Tensor) -> Tensor:
        if max(size := tuple(x.shape[2:])) < self.SMALLEST:
            raise ShapeError(f"ResNet18 with instance norm takes images of {self.SMALLEST} pixels or more; got {size}")
        x = F.max_pool2d(F.relu(F.instance_norm(self.stem(x))), 3, 2, padding=1)
        for stage in self.stages:
            x = stage(x)
        return self.projection(x.mean((2, 3)))


def our_name(name: str) -> str:
    """The name that a published checkpoint's tensor has here; other names are left as they are."""
    for published, ours in RENAMED.items():
        name = name.replace(published, ours)
    return name


def resnet18(weights: str | Path | None = None, width: int = WIDTH, projection: int | None = PROJECTED) -> Backbone:
    """ResNet18 with instance norm: 256 features after the projection, 512 without (projection=None); weights: a file."""
    net = ResNet18(width, projection)
    if weights is not None:
        tensors = {our_name(name): tensor for name, tensor in read_checkpoint(Path(weights)).items()}
        if projection is None:
            tensors = {name: tensor for name, tensor in tensors.items() if not name.startswith("projection.")}
        load_tensors(net, tensors, Path(weights))
    return Backbone(net, 8 * width if projection is None else projection)
