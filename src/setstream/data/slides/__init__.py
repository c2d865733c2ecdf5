"""Whole-slide images: tissue, patches, and patches as sets. Needs the extra `slides`."""

from setstream.data.slides.folder import camelyon16, camelyon16_labels, find_slides, open_slides, patch_slide, patch_slides
from setstream.data.slides.grid import Grid, GridOptions, Tissue, cut, find_tissue, read_grid, write_grid
from setstream.data.slides.pyramid import Slide, write_slide
from setstream.data.slides.source import SlideSource, heat_map, overview, save_png
from setstream.data.slides.tables import write_scores

__all__ = [
    "Grid", "GridOptions", "Slide", "SlideSource", "Tissue", "camelyon16", "camelyon16_labels", "cut",
    "find_slides", "find_tissue", "heat_map", "open_slides", "overview", "patch_slide", "patch_slides",
    "read_grid", "save_png", "write_grid", "write_scores", "write_slide",
]  # fmt: skip
