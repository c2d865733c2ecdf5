"""Backbones: published layouts of weights, folded norms, and that no image sees another."""

import pytest
import torch
import torch.nn.functional as F
from sklearn.datasets import load_sample_images
from torch import nn

import setstream as ss
from setstream import testing
from setstream.errors import ConfigurationError, DataError, ShapeError
from setstream.nn.backbones import BACKBONES, backbone
from setstream.nn.backbones.base import read_checkpoint
from setstream.nn.backbones.efficientnet_lite import imagenet_weights

SMALL = {"resnet18": {"width": 8, "projection": 16}, "efficientnet-lite0": {}, "small": {"width": 8}}


def published_resnet(width=8, projection=16, norm=nn.InstanceNorm2d):
    """The network of the published checkpoints, module by module as they name it."""

    class Basic(nn.Module):
        def __init__(self, into, out, stride):
            super().__init__()
            self.conv1, self.bn1 = nn.Conv2d(into, out, 3, stride, 1, bias=False), norm(out)
            self.conv2, self.bn2 = nn.Conv2d(out, out, 3, 1, 1, bias=False), norm(out)
            self.downsample = None
            if stride > 1 or into != out:
                self.downsample = nn.Sequential(nn.Conv2d(into, out, 1, stride, bias=False), norm(out))

        def forward(self, x):
            inner = self.bn2(self.conv2(F.relu(self.bn1(self.conv1(x)))))
            return F.relu(inner + (x if self.downsample is None else self.downsample(x)))

    class SimCLR(nn.Module):
        def __init__(self):
            super().__init__()
            widths = [width, width, 2 * width, 4 * width, 8 * width]
            stages = [
                nn.Sequential(Basic(widths[i], widths[i + 1], 1 if i == 0 else 2), Basic(widths[i + 1], widths[i + 1], 1))
                for i in range(4)
            ]
            stem = [nn.Conv2d(3, width, 7, 2, 3, bias=False), norm(width), nn.ReLU(), nn.MaxPool2d(3, 2, 1)]
            self.features = nn.Sequential(*stem, *stages, nn.AdaptiveAvgPool2d(1))
            self.l1, self.l2 = nn.Linear(8 * width, 8 * width), nn.Linear(8 * width, projection)

        def forward(self, x):
            h = self.features(x).flatten(1)
            return h, self.l2(F.relu(self.l1(h)))

    return SimCLR()


@pytest.mark.parametrize("wrapped", ["", "module."])
def test_resnet_reads_the_published_layout(tmp_path, wrapped):
    torch.manual_seed(1)
    published = published_resnet()
    tensors = {wrapped + name: tensor for name, tensor in published.state_dict().items()}
    assert f"{wrapped}features.5.0.downsample.0.weight" in tensors
    torch.save(tensors, tmp_path / "model.pth")
    x = torch.rand(3, 3, 70, 50)
    features, projected = published(x)
    found = backbone("resnet18", weights=tmp_path / "model.pth", **SMALL["resnet18"])
    torch.testing.assert_close(found(x), projected, rtol=1e-4, atol=1e-5)
    bare = backbone("resnet18", weights=tmp_path / "model.pth", width=8, projection=None)
    assert (found.out_dim, bare.out_dim) == (16, 64)
    torch.testing.assert_close(bare(x), features, rtol=1e-4, atol=1e-5)


def test_resnet_has_the_published_sizes():
    net = backbone("resnet18")
    assert net.out_dim == 256
    assert backbone("resnet18", projection=None).out_dim == 512
    convolutions = sum(p.numel() for name, p in net.named_parameters() if "projection" not in name)
    assert convolutions == 11_166_912  # torchvision's 11,689,512 without its norms (9,600) and its last layer (513,000)


def test_efficientnet_is_the_package_s_network_with_its_norms_folded():
    """Against batch norms that are not folded, in float64."""
    tensors = {
        name: tensor.double() for name, tensor in read_checkpoint(imagenet_weights()).items() if tensor.is_floating_point()
    }

    def convolve(x, name, norm, stride=1, groups=1):
        weight = tensors[f"{name}.weight"]
        kernel = weight.shape[-1]
        pad = max(0, (-(-x.shape[-1] // stride) - 1) * stride + kernel - x.shape[-1])
        x = F.conv2d(F.pad(x, (pad // 2, pad - pad // 2) * 2), weight, None, stride, groups=groups)
        own = [tensors[f"{norm}.{part}"] for part in ("running_mean", "running_var", "weight", "bias")]
        return F.batch_norm(x, *own, training=False, eps=1e-3)

    images = torch.rand(2, 3, 96, 96, dtype=torch.float64)
    x = F.relu6(convolve((images * 255 - 127) / 128, "_conv_stem", "_bn0", 2))
    for number in range(16):
        name, before = f"_blocks.{number}", x
        if number:
            x = F.relu6(convolve(x, f"{name}._expand_conv", f"{name}._bn0"))
        stride = 2 if number in (1, 3, 5, 11) else 1
        x = F.relu6(convolve(x, f"{name}._depthwise_conv", f"{name}._bn1", stride, x.shape[1]))
        x = convolve(x, f"{name}._project_conv", f"{name}._bn2")
        x = x + before if x.shape == before.shape else x
    x = F.relu6(convolve(x, "_conv_head", "_bn1")).mean((2, 3))
    net = backbone("efficientnet-lite0", weights="imagenet").double()
    assert net.out_dim == 1280
    torch.testing.assert_close(net(images), x, rtol=1e-5, atol=1e-6)  # the weights are float32


def test_efficientnet_knows_a_palace_and_a_daisy():
    images = []
    for image in load_sample_images().images:  # a Chinese palace and a flower
        x = torch.from_numpy(image.copy()).permute(2, 0, 1)[None] / 255
        side = min(x.shape[2:])
        top, left = (x.shape[2] - side) // 2, (x.shape[3] - side) // 2
        square = x[:, :, top : top + side, left : left + side]
        images.append(F.interpolate(square, (224, 224), mode="bicubic", antialias=True).clamp(0, 1))
    with torch.no_grad():
        features = backbone("efficientnet-lite0", weights="imagenet")(torch.cat(images))
    tensors = read_checkpoint(imagenet_weights())  # with ImageNet's classifier, which the backbone leaves out
    logits = F.linear(features, tensors["_fc.weight"], tensors["_fc.bias"])
    assert logits.argmax(1).tolist() == [698, 985]


@pytest.mark.parametrize("name", BACKBONES)
def test_no_image_sees_another_and_bytes_are_floats(name):
    net = backbone(name, **SMALL[name]).train()
    assert not any(isinstance(module, nn.modules.batchnorm._BatchNorm) for module in net.modules())
    pool = ss.UMBC(net.out_dim, num_slots=2)
    encoder = ss.SetEncoder(net, pool, cast_input=False)
    testing.check_mini_batch_consistency(encoder.eval(), torch.rand(1, 8, 3, 40, 40))
    images = torch.randint(0, 256, (4, 3, 40, 40), dtype=torch.uint8)
    torch.testing.assert_close(net(images), net(images / 255))


@pytest.mark.parametrize("name", BACKBONES)
def test_every_weight_learns(name):
    net = backbone(name, **SMALL[name]).train()
    net(torch.rand(2, 3, 64, 64)).square().sum().backward()
    assert all(p.grad is not None for p in net.parameters())


def flat_colours(size=2):
    """A backbone of the user's: the mean colour."""
    net = nn.Sequential(nn.AdaptiveAvgPool2d(size), nn.Flatten())
    net.out_dim = 3 * size**2
    return net


def not_a_backbone():
    return nn.Linear(3, 3)


def test_a_backbone_of_the_user_s():
    assert backbone(f"{__name__}:flat_colours", size=3)(torch.rand(2, 3, 8, 8)).shape == (2, 27)


def test_bad_backbones_are_explained(tmp_path):
    with pytest.raises(ConfigurationError, match="unknown backbone 'vit': choose one of resnet18, efficientnet-lite0, small"):
        backbone("vit")
    with pytest.raises(ConfigurationError, match="cannot be imported"):
        backbone("setstream.nothing:here")
    with pytest.raises(ConfigurationError, match="with an integer out_dim; it gave a Linear"):
        backbone(f"{__name__}:not_a_backbone")
    with pytest.raises(ConfigurationError, match="does not take these options"):
        backbone("resnet18", depth=50)
    with pytest.raises(DataError, match="no such file of weights"):
        backbone("resnet18", weights=tmp_path / "none.pth")
    (tmp_path / "bad.pth").write_bytes(b"nothing")
    with pytest.raises(DataError, match="bad.pth"):
        backbone("resnet18", weights=tmp_path / "bad.pth")
    torch.save({"features.0.weight": torch.zeros(2)}, tmp_path / "other.pth")
    with pytest.raises(ConfigurationError, match="not those of this model"):
        backbone("resnet18", weights=tmp_path / "other.pth")
    torch.save([1, 2], tmp_path / "list.pth")
    with pytest.raises(DataError, match="expected tensors by name"):
        backbone("resnet18", weights=tmp_path / "list.pth")
    net = backbone("resnet18", width=8)
    with pytest.raises(ShapeError, match="images \\(n, 3, height, width\\); got \\(2, 64, 64, 3\\)"):
        net(torch.rand(2, 64, 64, 3))
    with pytest.raises(ShapeError, match="33 pixels or more"):
        net(torch.rand(2, 3, 32, 32))
