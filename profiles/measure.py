"""The timing harness: repeats a callable and keeps every sample.

Warm-up calls come first and are not kept. The device is synchronised before the clock is read on either side, so a
kernel that was only queued is not taken for one that ran. It knows no device: the caller passes how to synchronise and
how to read peak memory.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True)
class Measurement:
    """Durations in us, in the order they were taken; peak memory in bytes, None where it cannot be read."""

    samples_us: tuple[int, ...]
    peak_memory_bytes: int | None


def measure(
    call: Callable[[], object],
    *,
    warmup: int = 1,
    repeats: int = 5,
    synchronise: Callable[[], None] = lambda: None,
    peak_memory_bytes: Callable[[], int | None] = lambda: None,
) -> Measurement:
    """Time ``call`` ``repeats`` times after ``warmup`` calls that do not count."""
    if repeats < 1 or warmup < 0:
        raise ValueError(f"repeats={repeats} must be at least 1 and warmup={warmup} at least 0")
    for _ in range(warmup):
        call()
    samples = []
    for _ in range(repeats):
        synchronise()
        start = time.perf_counter_ns()
        call()
        synchronise()
        samples.append(max(0, (time.perf_counter_ns() - start) // 1000))
    return Measurement(tuple(samples), peak_memory_bytes())
