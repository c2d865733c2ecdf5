"""The weights of a module as safetensors, and models that a file describes.

A file can name any sizes. So a model is first built on torch's meta device, which takes no memory, and for real only if the
names and shapes of its tensors are those in the header of the weights: what is allocated is then no larger than the file.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from itertools import count
from pathlib import Path
from threading import get_ident
from typing import Any, TypeVar

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.nn.modules.module import register_module_parameter_registration_hook
from torch.overrides import TorchFunctionMode

from setstream._utils.atomic import whole_or_nothing
from setstream.errors import ConfigurationError, SetstreamError

Module = TypeVar("Module", bound=nn.Module)
#: The largest number among the options of a file that need not be the size of a tensor.
LARGEST_OPTION = 4096
#: The most numbers in tensors of a model that are not in the file of its weights.
MOST_UNSAVED = 10**7


def save_weights(model: nn.Module, path: Path, dtype: torch.dtype | None = None) -> None:
    """Write the weights atomically, floating-point ones in `dtype` (None: as they are); shared tensors once per name."""
    tensors = {name: tensor.detach().cpu().clone().contiguous() for name, tensor in model.state_dict().items()}
    if dtype is not None:
        tensors = {name: tensor.to(dtype) if tensor.is_floating_point() else tensor for name, tensor in tensors.items()}
    with whole_or_nothing(path) as hidden:
        hidden.touch()
        mode = hidden.stat().st_mode  # as any new file here: safetensors makes one that only its owner can read
        save_file(tensors, hidden)
        with suppress(OSError):
            hidden.chmod(mode)


def load_weights(model: nn.Module, path: Path) -> None:
    """Load weights in the model's dtypes; the error says which do not fit."""
    try:
        load_tensors(model, load_file(path), path)
    except (SafetensorError, OSError) as error:
        raise _unfit(path, error) from error


def load_tensors(model: nn.Module, tensors: dict[str, Tensor], path: Path) -> None:
    """Load all tensors of a file into a module that has exactly these; the error says which do not fit."""
    try:
        model.load_state_dict(tensors)
    except RuntimeError as error:
        raise _unfit(path, error) from error


def load_model(build: Callable[[], Module], options: dict[str, Any], path: Path, *, trusted: bool = False) -> Module:
    """A model with the weights of a file, in eval mode, where a file chose its options.

    Args:
        build: Builds the model with these options; called twice, first on the meta device.
        options: The options, as the file has them.
        path: The weights.
        trusted: Whether the caller named code that takes part. If that code cannot run on the meta device, the model is built
            without the comparison of sizes.

    Raises:
        ConfigurationError: If the model cannot be built, or its tensors are not those of the file.
    """
    try:
        with safe_open(path, "pt") as file:
            shapes = {name: tuple(file.get_slice(name).get_shape()) for name in file.keys()}  # noqa: SIM118 - no mapping
    except (SafetensorError, OSError) as error:
        raise _unfit(path, error) from error
    widest = max((size for shape in shapes.values() for size in shape), default=0)
    for name, value in [] if trusted else _whole_numbers(options):
        if value > max(widest, LARGEST_OPTION):
            raise _unfit(path, f"{name} = {value} needs a larger model, the widest tensor has {widest} rows or columns")
    described = None
    with suppress(Exception) if trusted else building(options), _at_most(10 * len(shapes) + 1000, path):
        described = on_meta(build)
    if described is not None:
        check_shapes(described, shapes, path)
    with building(options):
        model = build()
    load_weights(model, path)
    return model.eval()


@contextmanager
def building(options: dict[str, Any]) -> Iterator[None]:
    """Make every error a ConfigurationError: a file may hold any value for any option."""
    try:
        yield
    except SetstreamError:
        raise
    except Exception as error:
        raise ConfigurationError(f"a model cannot be built with these options ({options}): {error}") from error


class _NotRandom(TorchFunctionMode):
    """Skip drawing normal numbers: the meta device has no values, and the first draw imports sympy, which takes a second."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None) -> Any:
        kwargs = dict(kwargs or {})
        if func is Tensor.normal_:
            return args[0]
        if func is torch.randn:
            func = torch.empty
            kwargs.pop("generator", None)
        return func(*args, **kwargs)


def on_meta(build: Callable[[], Module]) -> Module:
    """The module of `build` on the meta device: shapes without memory."""
    with torch.device("meta"), _NotRandom():
        return build()


def check_shapes(model: nn.Module, shapes: dict[str, tuple[int, ...]], path: Path) -> None:
    """Raise ConfigurationError unless the tensors of a model have these names and shapes."""
    tensors = {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}
    for name, module in model.named_modules():
        if rename := getattr(module, "rename_weights", None):
            rename(shapes, f"{name}." if name else "")
    for name in sorted(tensors.keys() | shapes.keys()):
        wanted, given = tensors.get(name, "missing"), shapes.get(name, "missing")
        if wanted != given:
            raise _unfit(path, f"{name} is {wanted} in the model and {given} in the file")
    unsaved = sum(buffer.numel() for name, buffer in model.named_buffers() if name not in shapes)
    if unsaved > MOST_UNSAVED:
        raise _unfit(path, f"the model needs {unsaved:,} numbers besides, and at most {MOST_UNSAVED:,} are allowed")


def _whole_numbers(options: dict[str, Any]) -> Iterator[tuple[str, int]]:
    """The whole numbers among options, by name; not those in lists, which may be the names of classes."""
    for name, value in options.items():
        if isinstance(value, dict):
            yield from _whole_numbers(value)
        elif isinstance(value, int):
            yield name, value


@contextmanager
def _at_most(parameters: int, path: Path) -> Iterator[None]:
    """Raise ConfigurationError once this thread has built modules with more parameters: even on meta they take memory."""
    thread, numbers = get_ident(), count(1)

    def registered(module: nn.Module, name: str, parameter: nn.Parameter | None) -> None:
        if get_ident() == thread and next(numbers) > parameters:
            raise _unfit(path, f"the model has more than {parameters} tensors")

    hook = register_module_parameter_registration_hook(registered)
    try:
        yield
    finally:
        hook.remove()


def _unfit(path: Path, why: object) -> ConfigurationError:
    return ConfigurationError(f"the weights in {path} are not those of this model: {why}")
