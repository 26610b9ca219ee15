"""Ray: how this project starts it, what it can take, and what a link between two of its processes costs.

The environment that Ray reads at its first import is set here, by the launcher, so that users need not know it.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Sequence
from typing import Any


def now_us() -> int:
    """This process's monotonic clock."""
    return time.monotonic_ns() // 1000


def is_running() -> bool:
    """Whether this process has started Ray, or joined a cluster, already."""
    ray = sys.modules.get("ray")
    return ray is not None and bool(ray.is_initialized())


def start_ray(lanes: int) -> Any:
    """Ray on this host, or the cluster that RAY_ADDRESS names. Its environment must be set before the first import.

    Workers of a local cluster listen on the loopback interface only, keep their normal priority (Ray would make them
    yield to every other process, which distorts timing), and report nothing to anybody.
    """
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    os.environ.setdefault("RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER", "0")
    os.environ.setdefault("RAY_worker_niceness", "0")
    os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
    import ray

    if ray.is_initialized():
        return ray
    if "RAY_ADDRESS" in os.environ:
        ray.init(address=os.environ["RAY_ADDRESS"], logging_level="ERROR", log_to_driver=False)
        return ray
    ray.init(
        num_cpus=max(2, os.cpu_count() or 2),
        include_dashboard=False,
        logging_level="ERROR",
        log_to_driver=False,
        object_store_memory=200 * 1024**2 if lanes <= 16 else None,
        _node_ip_address="127.0.0.1",
    )
    return ray


class _Echo:
    """One end of a link under test."""

    def export(self, size_bytes: int) -> tuple[int, Any]:
        import numpy as np

        return now_us(), np.zeros(size_bytes, dtype=np.uint8)

    def receive(self, message: tuple[int, Any]) -> int:
        message[1].copy()
        return now_us() - message[0]


def link_samples(sizes_bytes: Sequence[int], repeats: int = 7) -> list[int]:
    """Median us to move a message of each size from one Ray process to another, the receiver's copy included."""
    ray = start_ray(2)
    try:
        source, target = (ray.remote(_Echo).options(num_cpus=0).remote() for _ in range(2))
        medians = []
        for size in sizes_bytes:
            ray.get(target.receive.remote(source.export.remote(size)))
            samples = [ray.get(target.receive.remote(source.export.remote(size))) for _ in range(repeats)]
            medians.append(sorted(samples)[repeats // 2])
        return medians
    finally:
        ray.shutdown()
