"""Long documents: a set encoder before a pretrained language model."""

from setstream.tasks.documents.models import MODELS
from setstream.tasks.documents.task import CORPORA, Documents

__all__ = ["CORPORA", "MODELS", "Documents"]
