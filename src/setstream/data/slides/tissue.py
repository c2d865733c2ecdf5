"""Where there is tissue: Otsu's threshold on the saturation of a small picture of the slide.

    saturation   S = (max(r, g, b) - min(r, g, b)) / max(r, g, b)        glass is grey or white, stain has colour
    threshold    t* = argmax_t  w0(t) w1(t) (μ0(t) - μ1(t))²             Otsu: the two sides as far apart as possible
    tissue       median(S) > t*, closed; specks and holes that are too small are dropped and filled

Otsu, "A threshold selection method from gray-level histograms", 1979.
"""

import math
from dataclasses import dataclass

import numpy as np

from setstream._utils.optional import need
from setstream.data.slides.pyramid import Slide

#: The longest side of the picture that is analysed, and the side of a patch in it that is enough.
LONGEST, ENOUGH = 4096, 16
#: Saturations below this are glass, for any Otsu threshold: an empty slide has no two classes.
GLASS = 0.03
#: Specks smaller than this share of a patch are dropped, holes smaller than that are filled.
SPECK, HOLE = 0.25, 1.0


@dataclass(frozen=True)
class Tissue:
    """A mask (h, w) over the slide, each of its pixels `downsample` pixels of level 0 wide; the threshold that made it."""

    mask: np.ndarray
    downsample: float
    threshold: float

    def share(self, coords: np.ndarray, extent: int) -> np.ndarray:
        """The share of tissue in each square of `extent` at coords (N, 2), exact for the mask: by its integral image.

        Example:
            >>> tissue = Tissue(np.array([[True, False], [True, True]]), 10.0, 0.1)
            >>> tissue.share(np.array([[0, 0], [5, 0], [0, 10]]), 10)
            array([1. , 0.5, 1. ])
        """
        corner = np.pad(self.mask.astype(np.float64).cumsum(0).cumsum(1), ((1, 0), (1, 0)))
        low, high = coords / self.downsample, (coords + extent) / self.downsample
        (x0, y0), (x1, y1) = low.T, high.T
        inside = _between(corner, x1, y1) - _between(corner, x0, y1) - _between(corner, x1, y0) + _between(corner, x0, y0)
        return inside / (extent / self.downsample) ** 2


def _between(corner: np.ndarray, x: np.ndarray, y: np.ndarray) -> np.ndarray:
    """The integral image between its pixels: bilinear, which is exact for constant pixels."""
    height, width = (length - 1 for length in corner.shape)
    x, y = x.clip(0, width), y.clip(0, height)
    left, top = np.minimum(x.astype(np.int64), max(width - 1, 0)), np.minimum(y.astype(np.int64), max(height - 1, 0))
    across, down = x - left, y - top
    upper = corner[top, left] * (1 - across) + corner[top, left + 1] * across
    lower = corner[top + 1, left] * (1 - across) + corner[top + 1, left + 1] * across
    return upper * (1 - down) + lower * down


def find_tissue(slide: Slide, extent: int, threshold: float | None = None) -> Tissue:
    """The tissue of a slide, for patches of `extent` pixels of level 0; threshold: of the saturation, Otsu's unless given."""
    filters, morphology = need("skimage.filters", "slides"), need("skimage.morphology", "slides")
    downsample = max(extent / ENOUGH, max(slide.size) / LONGEST, 1.0)
    picture = slide.thumbnail(downsample)
    high = picture.max(-1).astype(np.float32)
    values = filters.median((high - picture.min(-1)) / np.maximum(high, 1.0), morphology.disk(2))  # zero for black
    if threshold is None:
        threshold = max(float(filters.threshold_otsu(values)) if np.ptp(values) > 0 else 0.0, GLASS)
    mask = morphology.closing(values > threshold, morphology.disk(2))
    patch = (extent / downsample) ** 2
    mask = morphology.remove_small_objects(mask, max_size=max(math.ceil(SPECK * patch) - 1, 0))
    mask = morphology.remove_small_holes(mask, max_size=max(math.ceil(HOLE * patch) - 1, 0))
    return Tissue(mask, downsample, threshold)
