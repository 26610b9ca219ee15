"""What finer and freer placements are worth: the published space, every scoring mode, candidates split by step.

The four published pairs on six GPUs at 6, 12 and 24 candidates and every legal number of mini-batches from 1 to 4, with
their shipped (provisional) costs. Per setting: the best schedule that is not ours at its best split and scoring; the
best of the published space (whole candidates, gathered scores), certified; the best under any scoring mode, certified;
split by step, found; a lower bound for any schedule of divisible candidates. Deterministic but for the seconds.
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path
from typing import Any

from record import conditions, markdown, write

from stagebreaker.placement.__main__ import find_profile
from stagebreaker.placement.planner import make_plan
from stagebreaker.profiles.document import InputError
from stagebreaker.sim.published import PAIRS
from stagebreaker.sim.workload import Cluster, Workload, load_workload

GPUS = 6
SPACES = ("published_us", "any_scoring_us", "split_us")


def settings(candidates: list[int]) -> list[Workload]:
    """The legal ones; groups are halves of the batch."""
    found = []
    for pair in PAIRS:
        for n in candidates:
            for m in (1, 2, 3, 4):
                try:
                    fields = (f"candidates={n}", f"group_size={n // 2}", f"mini_batches={m}")
                    found.append(load_workload(pair, fields))
                except InputError:  # KVPO's groups may not be split
                    continue
    return found


def measure(workload: Workload) -> dict[str, Any]:
    """Step times in us of one setting."""
    profile, _ = find_profile(str(workload.profile), workload.name, workload.profile)
    cluster = Cluster.equal(GPUS, profile.gpu_kinds[0].name)
    start = time.perf_counter()
    published = make_plan(workload, cluster, profile, scoring=("one_batch",), method="bound")
    finer = make_plan(workload, cluster, profile, method="bound", finer=True)
    assert finer.finer is not None
    assert finer.best_baseline is not None
    return {
        "pair": workload.name,
        "candidates": workload.candidates,
        "mini_batches": workload.mini_batches,
        "baseline": finer.best_baseline,
        "baseline_us": finer.plan.schedules[finer.best_baseline].best_split_step_us,
        "published_us": published.plan.schedules["stagebreaker"].step_us,
        "any_scoring_us": finer.finer.whole_us,
        "split_us": finer.finer.step_us,
        "bound_us": finer.any_schedule_bound_us,
        "seconds": time.perf_counter() - start,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results"))
    parser.add_argument("--candidates", type=int, nargs="+", default=[6, 12, 24])
    options = parser.parse_args()
    where = conditions("simpy", "numpy")
    found = [measure(workload) for workload in settings(options.candidates)]
    for row in found:
        if not row["bound_us"] <= row["split_us"] <= row["any_scoring_us"] <= row["published_us"]:
            raise SystemExit(f"a finer space is worse, or a bound too high: {row}")
    columns = (
        "pair, candidates, mini-batches",
        "not ours",
        "published space",
        "any scoring",
        "split",
        "off",
        "over bound",
    )
    rows = [
        (
            f"{r['pair']}, {r['candidates']}, {r['mini_batches']}",
            f"{r['baseline_us'] / 1e6:.1f} s",
            *(
                f"{r[k] / 1e6:.1f} s ({r['baseline_us'] / r[k]:.2f}x)"
                for k in ("published_us", "any_scoring_us", "split_us")
            ),
            f"{100 * (1 - r['split_us'] / r['published_us']):.1f} %",
            f"{100 * (r['split_us'] / r['bound_us'] - 1):.0f} %",
        )
        for r in found
    ]
    note = (
        "Best step on six GPUs and, in brackets, how many times as fast as the best schedule not ours. Off: what "
        "splitting takes off the published space. Over bound: above a bound for any schedule of divisible candidates."
    )
    total = sum(r["seconds"] for r in found)
    write(
        options.out,
        "spaces",
        "Placement spaces: published, any scoring, candidates split by step",
        where,
        {"settings": found},
        [note, "", *markdown(columns, rows), "", f"{len(found)} settings in {total:.0f} s."],
    )


if __name__ == "__main__":
    main()
