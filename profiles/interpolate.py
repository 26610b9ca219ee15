"""Batch curves: the duration of a batch between two measured batch sizes.

Linear between neighbours, which is exact for the affine curve t0 + b*t1 of a memory-bound decoder and
conservative for a concave one. Outside the measured range the answer would be a guess, so it is refused
unless asked for; then the nearest two points are continued.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Mapping

from stagebreaker.profiles.document import InputError


def interpolate_us(points_us: Mapping[int, int], batch_size: int, what: str, *, extrapolate: bool = False) -> int:
    """Duration in us at ``batch_size`` from measured ``points_us`` (batch size -> us).

    Raises ``InputError`` outside the measured range unless ``extrapolate``.
    """
    sizes = sorted(points_us)
    if batch_size in points_us:
        return points_us[batch_size]
    inside = sizes[0] < batch_size < sizes[-1]
    if not inside and (not extrapolate or len(sizes) < 2):
        raise InputError(
            f"batch size {batch_size} of {what} is outside the measured {sizes[0]}..{sizes[-1]}; "
            f"profile that batch size"
        )
    index = min(max(bisect_left(sizes, batch_size), 1), len(sizes) - 1)
    low, high = sizes[index - 1], sizes[index]
    rise = (points_us[high] - points_us[low]) * (batch_size - low)
    return max(0, points_us[low] + round(rise / (high - low)))
