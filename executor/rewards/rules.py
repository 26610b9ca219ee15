"""A reward that needs no model: brightness, contrast and smoothness of the pixels.

Each part is a continuous function of the video alone, in [0, 1], so the score is the same in every batch and
a policy can visibly learn it. It says nothing about quality: it stands in for a judge's verdict in tests,
demos and learning curves. It does not know prompts or models.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from stagebreaker.executor.rewards.protocol import Outcome, Request, Scored, Unscorable


def rule_dims(video: np.ndarray) -> dict[str, float]:
    """Parts of the score of a uint8 video [n_frames, height, width, 3].

    brightness: mean pixel / 255. contrast: spatial standard deviation of grey levels, averaged over frames,
    saturating at a quarter of the range. smoothness: 1 / (1 + 20 d), d the mean absolute change between
    neighbouring frames over 255; a still video is perfectly smooth.
    """
    pixels = video.astype(np.float64) / 255.0
    grey = pixels.mean(axis=-1)
    change = float(np.abs(np.diff(pixels, axis=0)).mean()) if len(pixels) > 1 else 0.0
    return {
        "brightness": float(pixels.mean()),
        "contrast": float(np.tanh(grey.std(axis=(1, 2)).mean() * 4.0)),
        "smoothness": 1.0 / (1.0 + 20.0 * change),
    }


def rule_value(dims: Mapping[str, float]) -> float:
    """The plain mean of the parts."""
    return sum(dims.values()) / len(dims)


def defect(request: Request) -> str | None:
    """Why the request cannot be scored, or None."""
    for position, video in enumerate(request.frames):
        where = f"video {position} of {request.key}"
        if video.size == 0:
            return f"{where} is empty (shape {video.shape})"
        if video.ndim != 4 or video.shape[-1] != 3:
            return f"{where} has shape {video.shape}, must be [n_frames, height, width, 3]"
        if np.issubdtype(video.dtype, np.floating) and not bool(np.isfinite(video).all()):
            return f"{where} has pixels that are not finite"
        if video.dtype != np.uint8:
            return f"{where} has dtype {video.dtype}, must be uint8"
    if len({video.shape for video in request.frames}) > 1:
        return f"videos of {request.key} differ in shape: {', '.join(str(v.shape) for v in request.frames)}"
    return None


def rule_outcome(request: Request) -> Outcome:
    """One video: its score. A pair: 1 if the first has the higher score, 0 if the second, 0.5 if equal."""
    reason = defect(request)
    if reason is not None:
        return Unscorable(reason)
    parts = [rule_dims(video) for video in request.frames]
    values = [rule_value(dims) for dims in parts]
    if len(values) == 1:
        return Scored(values[0], parts[0])
    first, second = values
    return Scored(0.5 if first == second else float(first > second), {"first": first, "second": second})
