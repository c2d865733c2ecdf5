"""A stream on a device without PyTorch: three graphs, and the empty state::

    folder/update.onnx     state, chunk (B, n, d)      -> state           any B, and any n > 0
           merge.onnx      state, other state          -> state
           predict.onnx    state                       -> output          head(finalize(state))
           empty.npz       the state of one set without elements; repeat its rows for more sets

The tensors of a state have the names of `setstream.models.functional`; those of the other state, and the new ones, have
`other.` and `new.` in front. The graphs are those of eval mode.
"""

import logging
import warnings
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor, nn

from setstream._utils.optional import need
from setstream.errors import ConfigurationError, ShapeError
from setstream.models import functional as pure
from setstream.models.model import SetModel
from setstream.models.stream import evaluating
from setstream.pools.base import named_tensors


class _Graph(nn.Module):
    """A pure function of a model, on tensors as positional arguments."""

    def __init__(self, model: SetModel, run: Callable[..., Any]) -> None:
        super().__init__()
        self.model, self.run = model, run

    def forward(self, *tensors: Tensor) -> tuple[Tensor, ...]:
        return tuple(tensor for _, tensor in named_tensors(self.run(*tensors)))


def export(model: SetModel, folder: str | Path, elements: Tensor, *, chunks: str | None = None) -> Path:
    """Write update.onnx, merge.onnx, predict.onnx and empty.npz.

    The head returns a tensor, a dict of tensors, or something that names its tensors (`named()`, like a mixture): outputs
    of predict.onnx are then `output`, `output.means` and the like. `ChunkMean` and your own pools can be exported if
    torch.onnx knows their operators.

    Args:
        model: The model; it is exported in eval mode.
        elements: (M, ...), an example of elements; one is enough.
        chunks: "average" exports a model that is not consistent, whose answer depends on the chunks that it is given.
    """
    for package in ("onnx", "onnxscript"):
        need(package, "onnx", "ONNX files")
    if elements.dim() < 2 or not len(elements):
        raise ShapeError(f"elements are (M, ...), at least one, to show what elements look like; got {tuple(elements.shape)}")
    encoder, folder = model.encoder, Path(folder)
    folder.mkdir(parents=True, exist_ok=True)

    def states(tensors: tuple[Tensor, ...]) -> pure.Tensors:
        return dict(zip(names, tensors, strict=True))

    def update(*tensors: Tensor) -> pure.Tensors:
        return pure.update(encoder, states(tensors[:-1]), tensors[-1], chunks=chunks)

    def merge(*tensors: Tensor) -> pure.Tensors:
        return pure.merge(encoder, states(tensors[: len(names)]), states(tensors[len(names) :]), chunks=chunks)

    def predict(*tensors: Tensor) -> Any:
        output = model.head(pure.finalize(encoder, states(tensors)))
        return output.named() if hasattr(output, "named") else output

    # Without the exporter's messages about missing packages and renamed values.
    with evaluating(model), warnings.catch_warnings(action="ignore"), ExitStack() as stack:
        for logger in map(logging.getLogger, ("torch.onnx", "onnxscript", "onnx_ir")):
            stack.callback(logger.setLevel, logger.level)
            logger.setLevel(logging.ERROR)
        if encoder.pool.draw_accumulators(1, elements.device, None):
            raise ConfigurationError("this pool draws at random in eval mode, too, which a graph cannot do")
        nothing, two = (pure.empty(encoder, sets, elements, chunks=chunks) for sets in (1, 2))
        names = list(nothing)
        chunk = torch.stack([elements[:1].expand(3, *elements.shape[1:])] * 2).contiguous()
        state = tuple(pure.update(encoder, two, chunk, chunks=chunks).values())
        other = tuple(tensor.clone() for tensor in state)  # the exporter would treat one tensor in two places as one input
        output = predict(*state)
        if not all(isinstance(tensor, Tensor) for _, tensor in named_tensors(output)):
            raise ConfigurationError(
                f"the head returns a {type(output).__name__}; a graph returns tensors: let it return a tensor, a dict of them, "
                "or something whose named() is one"
            )
        results, new = [name.replace("z", "output", 1) for name, _ in named_tensors(output)], [f"new.{name}" for name in names]
        batch, size = torch.export.Dim("batch", min=1), torch.export.Dim("size", min=1)
        graphs: list[tuple[Callable[..., Any], tuple[Tensor, ...], list[str], list[str]]] = [
            (update, (*state, chunk), [*names, "chunk"], new),
            (merge, (*state, *other), [*names, *(f"other.{name}" for name in names)], new),
            (predict, state, names, results),
        ]
        for run, example, inputs, outputs in graphs:
            axes = tuple({0: batch, 1: size} if tensor == "chunk" else {0: batch} for tensor in inputs)
            options: dict[str, Any] = {"input_names": inputs, "output_names": outputs, "dynamic_shapes": (axes,)}
            program = torch.onnx.export(_Graph(model, run).eval(), example, dynamo=True, verbose=False, **options)
            cast(torch.onnx.ONNXProgram, program).save(folder / f"{run.__name__}.onnx", external_data=False)
    arrays: dict[str, Any] = {name: tensor.cpu().numpy() for name, tensor in nothing.items()}
    np.savez(folder / "empty.npz", **arrays)
    return folder
