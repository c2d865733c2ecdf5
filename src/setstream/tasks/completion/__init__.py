"""Image completion: neural processes whose encoder reads pixels in any chunks."""

from setstream.tasks.completion.field import Decoder, Field, FieldHead
from setstream.tasks.completion.models import MODELS, AnchoredDecoder, pretrained
from setstream.tasks.completion.task import Completion, as_pixels, places

__all__ = ["MODELS", "AnchoredDecoder", "Completion", "Decoder", "Field", "FieldHead", "as_pixels", "places", "pretrained"]
