"""How fast the planner simulates: placements per second of SimPy and of the max-plus recurrence, and where time goes.

The workload is dancegrpo-vrt at 24 candidates on six GPUs: 21,125 placements in one scoring mode. One process, one
thread. Every 25th placement is evaluated in several rounds, each way in turn; then the whole space once through SimPy
(``stagebreaker-plan --search exhaustive``), and by branch and bound, which also takes kvpo-vrt's 3,570,125 placements.
The ways must agree wherever they meet.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from itertools import islice
from pathlib import Path
from typing import Any

from record import cell, conditions, markdown, rotated, spread, write

from stagebreaker.placement.__main__ import find_profile
from stagebreaker.placement.search import search
from stagebreaker.placement.space import Region, Space
from stagebreaker.sim.dispatch import Dispatch, GraphIndex
from stagebreaker.sim.engine import Costs, step_us
from stagebreaker.sim.recurrence import Recurrence
from stagebreaker.sim.schedules import Assigner, build_graph
from stagebreaker.sim.workload import Cluster, load_workload

GPUS = 6
WORKLOAD = load_workload("dancegrpo-vrt", ("candidates=24", "group_size=12"))
PROFILE, _ = find_profile(str(WORKLOAD.profile), WORKLOAD.name, WORKLOAD.profile)
CLUSTER = Cluster.equal(GPUS, PROFILE.gpu_kinds[0].name)


class Sample:
    """Every ``stride``-th placement of a region, with its graph made ready as the search makes it."""

    def __init__(self, region: Region, stride: int) -> None:
        base = region.base()
        graph = build_graph(WORKLOAD, base)
        self.placements = list(islice(region.placements(), 0, None, stride))
        self.index, self.assign = GraphIndex(graph, PROFILE), Assigner(WORKLOAD, base, graph)
        self.costs = Costs(graph, PROFILE, CLUSTER, WORKLOAD.trained_steps)
        self.recurrence = Recurrence(graph, self.costs)

    def assigned(self) -> list[object]:
        return [self.assign(p) for p in self.placements]

    def dispatched(self) -> list[object]:
        return [Dispatch(self.index, self.assign(p)) for p in self.placements]

    def simpy(self) -> list[object]:
        return [step_us(self.index, self.assign(p), self.costs) for p in self.placements]

    def maxplus(self) -> list[object]:
        return [self.recurrence.step_us(self.assign(p)) for p in self.placements]


WAYS: dict[str, Callable[[Sample], list[object]]] = {
    "assign": Sample.assigned,
    "assign and dispatch": Sample.dispatched,
    "SimPy": Sample.simpy,
    "recurrence": Sample.maxplus,
}


def rounds(samples: list[Sample], repeats: int) -> dict[str, list[float]]:
    """Seconds per round of each way, interleaved; the first round warms up and is not kept."""
    seconds: dict[str, list[float]] = {name: [] for name in WAYS}
    for n in range(repeats + 1):
        found = {}
        for name, way in rotated(WAYS, n):
            start = time.perf_counter()
            found[name] = [way(sample) for sample in samples]
            if n:
                seconds[name].append(time.perf_counter() - start)
        if found["SimPy"] != found["recurrence"]:
            raise SystemExit("SimPy and the recurrence disagree: these numbers would mean nothing")
    return seconds


def branch_and_bound(name: str, repeats: int) -> dict[str, Any]:
    """Seconds to the certified optimum of a workload at 24 candidates, one scoring mode, every GPU split."""
    workload = load_workload(name, ("candidates=24", "group_size=12"))
    profile, _ = find_profile(str(workload.profile), workload.name, workload.profile)
    cluster, space = Cluster.equal(GPUS, profile.gpu_kinds[0].name), Space.of(workload, GPUS, None, ("one_batch",))
    seconds = []
    for _ in range(repeats):
        start = time.perf_counter()
        found = search(workload, cluster, profile, space, method="bound")
        seconds.append(time.perf_counter() - start)
    return {
        "workload": name,
        "placements": space.size,
        "seconds": seconds,
        "evaluated": found.evaluated,
        "pruned": found.pruned,
        "step_us": found.best.step_us,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results"))
    parser.add_argument("--repeats", type=int, default=9)
    parser.add_argument("--stride", type=int, default=25)
    options = parser.parse_args()
    where = conditions("simpy", "numpy")

    space = Space.of(WORKLOAD, GPUS, None, ("one_batch",))
    samples = [Sample(region, options.stride) for region in space.regions]
    count = sum(len(sample.placements) for sample in samples)
    seconds = rounds(samples, options.repeats)
    start = time.perf_counter()
    result = search(WORKLOAD, CLUSTER, PROFILE, space, method="exhaustive")
    full_s = time.perf_counter() - start
    bounded = [branch_and_bound(name, options.repeats) for name in ("dancegrpo-vrt", "kvpo-vrt")]
    if bounded[0]["step_us"] != result.best.step_us:
        raise SystemExit("branch and bound and the enumeration disagree: these numbers would mean nothing")

    rate = {name: [count / s for s in seconds[name]] for name in ("SimPy", "recurrence")}
    whole = spread(seconds["SimPy"])["median"]
    assign, both = (spread(seconds[name])["median"] for name in ("assign", "assign and dispatch"))
    shares = {"Assigner": assign / whole, "Dispatch": (both - assign) / whole, "engine": (whole - both) / whole}
    faster = [s / r for s, r in zip(seconds["SimPy"], seconds["recurrence"], strict=True)]
    data: dict[str, Any] = {
        "workload": "dancegrpo-vrt, 24 candidates, 2 mini-batches, 6 GPUs, scoring one_batch",
        "tasks_per_graph": len(samples[0].index.tasks),
        "sampled_placements": count,
        "seconds_per_round": seconds,
        "placements_per_s": {name: spread(values) for name, values in rate.items()},
        "recurrence_speedup": spread(faster),
        "share_of_time": shares,
        "full_enumeration": {
            "placements": result.simulated,
            "seconds": full_s,
            "placements_per_s": result.simulated / full_s,
            "step_us": result.best.step_us,
        },
        "branch_and_bound": bounded,
    }
    rows = [
        ("SimPy engine, placements per second", cell(rate["SimPy"], 0)),
        ("max-plus recurrence, placements per second", cell(rate["recurrence"], 0)),
        ("recurrence over SimPy", cell(faster, 2, "x")),
        (f"all {result.simulated:,} placements through SimPy, seconds", f"{full_s:.1f} (one run)"),
        *(
            (
                f"branch and bound, {b['workload']}: {b['placements']:,} placements, seconds",
                cell(b["seconds"], 2),
            )
            for b in bounded
        ),
        *((f"share of a SimPy evaluation: {name}", f"{100 * value:.0f} %") for name, value in shares.items()),
    ]
    title = f"Planner: {data['workload']}"
    note = f"{count} placements a round, {options.repeats} rounds; {data['tasks_per_graph']} tasks a graph; one thread."
    write(options.out, "planner", title, where, data, [note, "", *markdown(("", "median"), rows)])


if __name__ == "__main__":
    main()
