"""Digests of bytes and of tensors."""

import hashlib

import torch
from torch import Tensor


def digest(data: bytes) -> str:
    """BLAKE2b of 128 bits, as text."""
    return hashlib.blake2b(data, digest_size=16).hexdigest()


def tensor_bytes(tensor: Tensor) -> bytes:
    """The raw bytes of a tensor, of any dtype, as in a file."""
    flat = tensor.detach().to("cpu").contiguous().reshape(-1)
    return flat.view(torch.uint8).numpy().tobytes() if flat.numel() else b""
