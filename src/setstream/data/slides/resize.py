"""Make a picture smaller: each new pixel is the mean over its area.

    new_i = 1/(e_{i+1} - e_i) ∫_{e_i}^{e_{i+1}} old(t) dt          e: the edges of the new pixels, counted in old ones

One axis after the other, by differences of the integral, which is linear between whole pixels. Exact for any ratio; the box
filters of imaging libraries are exact for whole ratios only.
"""

import numpy as np


def area_mean(picture: np.ndarray, edges: np.ndarray, axis: int) -> np.ndarray:
    """The means of `picture` between the edges along one axis, in float64; the picture itself where nothing changes.

    >>> area_mean(np.array([3.0, 0.0, 6.0]), np.array([0.0, 1.5, 3.0]), axis=0)
    array([2., 4.])
    """
    if len(edges) == picture.shape[axis] + 1 and np.array_equal(edges, np.arange(len(edges))):
        return picture
    rows = np.moveaxis(picture, axis, 0)
    integral = np.concatenate([np.zeros((1, *rows.shape[1:])), rows.cumsum(0, dtype=np.float64)])
    edges = np.clip(edges, 0, len(rows))
    below = np.minimum(edges.astype(np.int64), len(rows) - 1)
    inside = (edges - below).reshape(-1, *[1] * (rows.ndim - 1))
    means = np.diff(integral[below] + inside * rows[below], axis=0) / np.diff(edges).reshape(inside[1:].shape)
    return np.moveaxis(means, 0, axis)


def shrink(picture: np.ndarray, vertical: np.ndarray, horizontal: np.ndarray) -> np.ndarray:
    """A picture (H, W, 3) of bytes with new rows and columns between these edges."""
    return np.rint(area_mean(area_mean(picture, vertical, 0), horizontal, 1)).astype(np.uint8)
