"""SetModel: an encoder and a head.

y = head(encoder(set))          head: any set function; the slots are few
"""

from typing import Any

from torch import Tensor, nn

from setstream.errors import ShapeError
from setstream.models.encoder import SetEncoder
from setstream.models.pretrained import Pretrained
from setstream.models.stream import SetStream
from setstream.models.window import Late, Window
from setstream.sets.layout import Sets
from setstream.states.state import State


class SetModel(Pretrained, nn.Module):
    """An encoder and a head: y = head(encoder(set)).

    `head` is any module on the pool's output, (B, num_slots, out_dim): a Set Transformer, a BERT, an MLP. The head sees the
    same slots for every way of cutting the set, so the model is as consistent as its encoder.

    >>> import torch, setstream as ss
    >>> encoder = ss.SetEncoder(torch.nn.Linear(2, 16), ss.UMBC(16, num_slots=4, out_dim=16))
    >>> model = ss.SetModel(encoder, ss.nn.SetTransformer(16, out_dim=3))
    >>> model(torch.randn(5, 100, 2)).shape
    torch.Size([5, 1, 3])
    """

    def __init__(self, encoder: SetEncoder, head: nn.Module) -> None:
        super().__init__()
        self.encoder = encoder
        self.head = head

    def forward(self, sets: Sets, mask: Tensor | None = None) -> Any:
        """The head's output for whole sets."""
        return self.head(self.encoder(sets, mask))

    def finalize(self, state: State, *, chunks: str | None = None) -> Any:
        """The head's output for a state of the encoder; `chunks` as in `SetEncoder.update`."""
        z = self.encoder.finalize(state, chunks=chunks)
        try:
            return self.head(z)
        except (RuntimeError, ShapeError) as error:
            if state.count.all():
                raise
            raise ShapeError(
                f"a set without elements has no prediction here: the pool's result {tuple(z.shape)} has no width before the "
                "first element, and the head cannot read it. Add an element first"
            ) from error

    def stream(self, *, chunks: str | None = None) -> SetStream:
        """A stream to which elements are added as they arrive, and which predicts at any time; `chunks` as in `SetStream`."""
        return SetStream(self, chunks=chunks)

    def window(
        self,
        *,
        count: int | None = None,
        span: float | None = None,
        tile: float,
        late: Late = "drop",
        chunks: str | None = None,
    ) -> Window:
        """A stream that predicts for its last elements only, the last `count` or those of the last `span`; see `Window`."""
        return Window(self, count=count, span=span, tile=tile, late=late, chunks=chunks)
