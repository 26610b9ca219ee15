"""Which device and precision to run with: what was asked for, or the best there is."""

from __future__ import annotations

import torch

from stagebreaker.profiles.document import InputError


def pick(device: str, dtype: str) -> tuple[str, str]:
    """(device, dtype) for "auto" or explicit choices; ``InputError`` for what is not there."""
    if device not in ("auto", "cpu", "cuda"):
        raise InputError(f"--device {device!r} must be auto, cpu or cuda")
    if dtype not in ("auto", "float32", "bfloat16"):
        raise InputError(f"--dtype {dtype!r} must be auto, float32 or bfloat16")
    if device == "cuda" and not torch.cuda.is_available():
        raise InputError(
            "--device cuda, but torch sees no CUDA device; use --device cpu, or install a CUDA build of torch"
        )
    where = device if device != "auto" else ("cuda" if torch.cuda.is_available() else "cpu")
    return where, dtype if dtype != "auto" else ("bfloat16" if where == "cuda" else "float32")
