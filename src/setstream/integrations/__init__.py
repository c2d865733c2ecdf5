"""Interfaces to scikit-learn, PyG and ONNX, each with its extra, and to weights of MIL libraries; imported at first use."""

from importlib import import_module
from types import ModuleType

NAMES = ("mil", "onnx", "pyg", "sklearn")


def __getattr__(name: str) -> ModuleType:
    if name in NAMES:
        return import_module(f"{__name__}.{name}")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(NAMES)
