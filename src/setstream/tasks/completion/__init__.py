"""Image completion: neural processes whose encoder reads pixels in any chunks."""

from setstream.tasks.completion.field import AttentiveDecoder, Decoder, Field, FieldHead
from setstream.tasks.completion.models import MODELS
from setstream.tasks.completion.pretrained import pretrained
from setstream.tasks.completion.task import Completion, as_pixels, places

__all__ = ["MODELS", "AttentiveDecoder", "Completion", "Decoder", "Field", "FieldHead", "as_pixels", "places", "pretrained"]
