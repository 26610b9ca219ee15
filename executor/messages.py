"""Messages between workers: results as numpy arrays and plain values, and back.

numpy travels through Ray without a copy, torch tensors do not. Arrays that arrive are read-only and are copied once, to
the receiver's device. numpy has no bfloat16; float32 holds it exactly.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

from stagebreaker.executor.algorithms.rollout import Trajectory
from stagebreaker.executor.kernels.reward_async import SignGradients

Message = Mapping[str, Any]


def pack(value: Any) -> Message:
    """A message that ``unpack`` turns into an equal value."""
    if isinstance(value, tuple):  # a trajectory and the text it was made for
        trajectory, text = value
        return {"trajectory": trajectory.to_numpy(), "text": to_numpy(text)}
    if isinstance(value, SignGradients):
        minus = None if value.n_buffers == 1 else to_numpy(value.minus_P)
        return {"plus": to_numpy(value.plus_P), "minus": minus, "clip": value.clip}
    if isinstance(value, list):
        return {"tensors": [to_numpy(v) for v in value]}
    if isinstance(value, Tensor):
        return {"tensor": to_numpy(value)}
    return {"value": value}


def unpack(message: Message, device: str, text_dtype: torch.dtype) -> Any:
    """The inverse of ``pack``, on this device; conditioning text is cast to ``text_dtype``."""
    if "trajectory" in message:
        text = to_tensor(message["text"], device).to(text_dtype)
        return Trajectory.from_numpy(message["trajectory"], device), text
    if "plus" in message:
        plus = to_tensor(message["plus"], device)
        minus = plus if message["minus"] is None else to_tensor(message["minus"], device)
        return SignGradients(plus, minus, message["clip"])
    if "tensors" in message:
        return [to_tensor(array, device) for array in message["tensors"]]
    return to_tensor(message["tensor"], device) if "tensor" in message else message["value"]


def to_numpy(tensor: Tensor) -> np.ndarray:
    """A view where possible."""
    tensor = tensor.detach().cpu()
    array: np.ndarray = (tensor.float() if tensor.dtype == torch.bfloat16 else tensor).numpy()
    return array


def to_tensor(array: np.ndarray, device: str) -> Tensor:
    """A copy on the device."""
    return torch.from_numpy(array.copy()).to(device)


def size_bytes(message: Any) -> int:
    """Bytes of the arrays in a message."""
    if isinstance(message, np.ndarray):
        return int(message.nbytes)
    if isinstance(message, Mapping):
        return sum(size_bytes(value) for value in message.values())
    return sum(size_bytes(value) for value in message) if isinstance(message, list) else 0
