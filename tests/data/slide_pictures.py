"""Small pictures of tissue for tests: glass, a pink blob with texture, and, where asked for, a lesion."""

import numpy as np
import torch
from torch import nn


def blob(size, centre, radius):
    """A disc: (size, size) bool."""
    y, x = np.mgrid[:size, :size]
    return (y - centre[0]) ** 2 + (x - centre[1]) ** 2 < radius**2


def tissue_picture(seed, size=512, lesion=False):
    """A picture (size, size, 3), its tissue and its lesion as masks. Brown spots lie in every slide, blue lesions in some."""
    generator = np.random.default_rng(seed)
    centre = size / 2 + generator.uniform(-0.05, 0.05, 2) * size
    tissue = blob(size, centre, 0.38 * size)
    picture = np.full((size, size, 3), 244.0)
    picture[tissue] = generator.uniform(0.95, 1.05, 3) * (215, 130, 175)
    spot = blob(size, centre + generator.uniform(-0.15, 0.15, 2) * size, 0.06 * size)
    picture[spot] = (150, 100, 60)
    sick = np.zeros_like(tissue)
    if lesion:
        sick = blob(size, centre + generator.uniform(-0.18, 0.18, 2) * size, 0.09 * size)
        picture[sick] = (95, 70, 160)
    picture += generator.normal(0, 4 + 14 * tissue[..., None], picture.shape)
    return picture.clip(0, 255).astype(np.uint8), tissue, sick


class Colours(nn.Module):
    """A backbone of six features: means and standard deviations of the colours."""

    out_dim = 6

    def forward(self, x):
        flat = x.flatten(2)
        return torch.cat([flat.mean(2), flat.std(2)], dim=1)


def broken():
    """A backbone that makes NaN."""

    class Broken(Colours):
        def forward(self, x):
            return super().forward(x) / 0 * 0

    return Broken()
