"""Reproduces the published results from the fitted profiles: every row of Figures 3, 9 and 16.

All rows of Figures 9 and 16 were used in the fit, so agreement with them is in-sample; Figure 3 was not. For the rows
about the paper's placements the count space at 4+2 GPUs with gathered scoring is searched by branch and bound.
"""

from __future__ import annotations

import csv
import io
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from stagebreaker.placement.search import search
from stagebreaker.placement.space import SCHEDULE, Space
from stagebreaker.profiles.document import write_atomic
from stagebreaker.profiles.table import Profile
from stagebreaker.sim.dataflow import StepGraph
from stagebreaker.sim.fit import tolerance
from stagebreaker.sim.plan import Placement
from stagebreaker.sim.published import (
    ACTORS,
    CASES,
    PAIRS,
    REWARDS,
    Case,
    Published,
    Steps,
    all_cases,
    published,
    shipped_profile,
    steps_of,
)
from stagebreaker.sim.schedules import build_graph
from stagebreaker.sim.workload import Cluster

Row = dict[str, str | float | bool]
Progress = Callable[[int], None]


def reproduce(profiles: Mapping[str, Profile] | None = None, tick: Progress = lambda _: None) -> list[Row]:
    """One entry a row: ``{id, published_low, published_high, reproduced_low, reproduced_high, in_fit, ok}``.

    ``profiles``: pair -> profile; the fitted ones by default. ``tick(1)`` after each of the ``all_cases()``.
    """
    return rows_of(simulated(profiles, tick))


def simulated(
    profiles: Mapping[str, Profile] | None = None, tick: Progress = lambda _: None
) -> dict[Case, tuple[Placement, Steps]]:
    """Of each of the ``all_cases()`` the placement found for stagebreaker, and a step of every schedule."""
    profiles = profiles or {pair: shipped_profile(f"fitted-{pair}") for pair in PAIRS}
    found: dict[Case, tuple[Placement, Steps]] = {}
    for case in all_cases():
        profile = profiles[case.pair]
        placement = best_placement(case, profile)
        found[case] = (placement, steps_of(case, placement, profile))
        tick(1)
    return found


def rows_of(cases: Mapping[Case, tuple[Placement, Steps]]) -> list[Row]:
    """The rows of ``reproduce`` from what was simulated."""
    steps = {case: steps for case, (_, steps) in cases.items()}
    return [_row(row, *row.read(steps)) for row in published()]


def write_reproduction(cases: Mapping[Case, tuple[Placement, Steps]], out: Path) -> tuple[str, ...]:
    """fig3.png, fig9.png, fig16.png and reproduced.csv in ``out``; the names of the files.

    A row of the csv is one of ``reproduce`` with the relative errors of both ends.
    """
    from stagebreaker.sim.figures import figure_16, published_bars
    from stagebreaker.sim.plot import figure_of, save_figure

    steps = {case: steps for case, (_, steps) in cases.items()}
    for figure, ylabel in (("fig3", "share"), ("fig9", "speedup")):
        rows = [row for row in published() if row.id.startswith(f"{figure}.")]
        save_figure(figure_of(published_bars(rows, steps, ylabel=ylabel)), out / f"{figure}.png")
    (case,) = CASES["dancegrpo-vrt-24"]
    placement, shown = cases[case]
    save_figure(figure_16(shown, graphs_of(case, placement, shown))[0].figure, out / "fig16.png")
    write_atomic(out / "reproduced.csv", to_csv(rows_of(cases)))
    return "fig3.png", "fig9.png", "fig16.png", "reproduced.csv"


def graphs_of(case: Case, placement: Placement, steps: Steps) -> dict[str, StepGraph]:
    """Schedule -> the step graph of its timeline; ``placement`` is stagebreaker's."""
    still = {name: Placement(schedule=name, actors=ACTORS, rewards=REWARDS, scoring="on_arrival") for name in steps}
    return {name: build_graph(case.workload(name), (still | {placement.schedule: placement})[name]) for name in steps}


def to_csv(rows: Sequence[Row]) -> str:
    """Rows of ``reproduce`` as CSV, with ``error_low`` and ``error_high``: reproduced over published, less 1."""
    text = io.StringIO()
    writer = csv.DictWriter(text, [*rows[0], "error_low", "error_high"], lineterminator="\n")
    writer.writeheader()
    for row in rows:
        errors = {
            f"error_{end}": round(float(row[f"reproduced_{end}"]) / float(row[f"published_{end}"]) - 1, 4)
            for end in ("low", "high")
        }
        writer.writerow(row | errors)
    return text.getvalue()


def _row(row: Published, low: float, high: float) -> Row:
    return {
        "id": row.id,
        "published_low": row.low,
        "published_high": row.high,
        "reproduced_low": round(low, 4),
        "reproduced_high": round(high, 4),
        "in_fit": row.used_in_fit,
        "ok": is_reproduced(row, low, high),
    }


def is_reproduced(row: Published, low: float, high: float) -> bool:
    """Within the row's tolerance: a range holds the reproduced one when it is widened by 3 % at each end."""
    return low >= row.low - tolerance(row.id, row.low) and high <= row.high + tolerance(row.id, row.high)


def best_placement(case: Case, profile: Profile) -> Placement:
    """The best placement of the paper's space (4+2 GPUs, one gathered batch per judge), by branch and bound."""
    workload = case.workload(SCHEDULE)
    cluster = Cluster.equal(ACTORS + REWARDS, profile.gpu_kinds[0].name)
    space = Space.of(workload, ACTORS + REWARDS, (ACTORS, REWARDS), ("one_batch",))
    return search(workload, cluster, profile, space, method="bound").best.best
