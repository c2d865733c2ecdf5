"""The messages of the playground. `clear` (begin with an empty set) and `rewind` (stream the same set again) have no fields."""

from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field

MOST_POINTS = 2048
SIDE = 32

Number = Annotated[float, Field(ge=-100, le=100, allow_inf_nan=False)]
Point = tuple[Number, Number]
Position = Annotated[int, Field(ge=0, lt=MOST_POINTS)]
Label = Annotated[int, Field(ge=0, le=15)]
Seed = Annotated[int, Field(ge=0, lt=2**31)]


class Message(BaseModel):
    """The fields of a message, besides its number and its verb."""

    model_config = ConfigDict(extra="forbid")


# -- points -----------------------------------------------------------------------------------------------------------


class Draw(Message):
    """Begin with a set from a random mixture."""

    seed: Seed = 0
    points: int = Field(default=256, ge=1, le=MOST_POINTS)


class Put(Message):
    """More points for the set, each with a colour. They are not streamed yet."""

    points: list[Point] = Field(max_length=MOST_POINTS)
    labels: list[Label] = Field(max_length=MOST_POINTS)


class Order(Message):
    """The chunks of the set in one of the streams."""

    kind: str
    seed: Seed = 0


class Append(Message):
    """Stream some points of the set into the models, chunk after chunk."""

    chunks: list[Annotated[list[Position], Field(min_length=1)]] = Field(max_length=MOST_POINTS)


class Compare(Message):
    """Stream the set in all four orders: one answer for each model."""

    seed: Seed = 0


# -- pixels -----------------------------------------------------------------------------------------------------------

Place = Annotated[int, Field(ge=0, lt=SIDE * SIDE)]
Byte = Annotated[int, Field(ge=0, le=255)]


class Truth(Message):
    """Begin a picture; with all of its colours, row by row, if they are known."""

    colours: list[tuple[Byte, Byte, Byte]] | None = Field(default=None, min_length=SIDE * SIDE, max_length=SIDE * SIDE)


class Paint(Message):
    """Add pixels, place and colour, and remove others. A pixel that is painted twice has the last colour."""

    pixels: list[tuple[Place, Byte, Byte, Byte]] = Field(default=[], max_length=SIDE * SIDE)
    erase: list[Place] = Field(default=[], max_length=SIDE * SIDE)
