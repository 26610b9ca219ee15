"""Predicts speedups beyond the settings the costs were fitted to, with nothing fitted again.

A pair's fitted profile is scaled to another video length, resolution or model by the roofline alone: a cost of the new
setting is the fitted one times the formulas' new value over their value at the pair's default, on the same hardware;
sizes of data likewise. Where the formulas do not move, nothing does: candidates and mini-batches change no cost.
- Policy and VAE: rollout, decode, replays and context rebuild by FLOPs and bytes. A model brings its own attention
  window; LoRA rank and layers, denoising steps and chunk length stay the pair's.
- Judge: t(b) at every batch size by the judge's own t(b). It sees a fixed number of frames, so resolution moves it and
  neither video length nor model does.
- Update: what the formulas leave out (the framework's share, nearly all of it) stays; their part, which grows with the
  adapter, is exchanged. An engine switch grows with the weights it moves, a prompt costs what it did.
It knows neither memory limits nor whether a framework's overheads grow with the model, and refits nothing to find out.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, fields, replace
from functools import cache
from pathlib import Path

import pandas as pd
from matplotlib.figure import Figure

from stagebreaker.placement.reproduce import best_placement
from stagebreaker.placement.space import SCHEDULE
from stagebreaker.profiles.document import InputError
from stagebreaker.profiles.models import find_model
from stagebreaker.profiles.roofline import hardware_table
from stagebreaker.profiles.table import Profile, TaskCost
from stagebreaker.sim.plan import Placement
from stagebreaker.sim.published import ACTORS, BASELINES, PAIRS, REWARDS, Case, shipped_profile, step_of
from stagebreaker.sim.workload import RESOLUTIONS, Workload, load_workload, predicted_costs

Row = dict[str, str | int | float]
Progress = Callable[[int], None]

COLUMNS = (
    "pair", "candidates", "mini_batches", "latent_frames", "resolution", "policy",
    "schedule", "step_us", "speedup_vs_colocated", "speedup_vs_async_reward",
)  # fmt: skip
COMPARED = (*BASELINES, SCHEDULE, "colocated_merged", "async_reward_merged")
"""The published schedules, then what a user has without early training."""
NOTHING_MOVED = "merged_replay"
"""What stagebreaker is when nothing moves and scores come one by one."""
LARGE = "longlive-5b"
"""The 5B policy; the 1.3B one is the pair's own."""
VAES = {LARGE: "wan2.2"}
"""Policies that come with another VAE than their pair's."""
VALUES: dict[str, tuple[int | str, ...]] = {
    "latent_frames": (21, 33, 45),
    "candidates": (6, 12, 24),
    "resolution": ("360p", "480p"),
    "mini_batches": (1, 2, 3, 4, 6),
    "policy": (LARGE,),
}
"""Sweep, that is the field it moves -> its values. The pair's own policy is added to the last."""


# -- costs -----------------------------------------------------------------------------------------------------


def scaled_profile(profile: Profile, base: Workload, workload: Workload) -> Profile:
    """``profile``, whose costs are those of ``base``, scaled to ``workload`` by the roofline of the profile's GPU.

    A batch curve gets a point at every batch size between its ends. Raises ``InputError`` if the profile is of another
    workload than ``base``, has several kinds of GPU, or is of hardware that the hardware table does not have.
    """
    base.check_profile(profile)
    if len(profile.gpu_kinds) != 1:
        raise InputError(f"profile {profile.name!r} has {len(profile.gpu_kinds)} kinds of GPU; scale a profile of one")
    gpu = profile.gpu_kinds[0].name
    hardware = hardware_table().find(gpu)
    old, new = predicted_costs(base, hardware), predicted_costs(workload, hardware)
    tasks = []
    for kind in dict.fromkeys(task.kind for task in profile.tasks):
        curve = profile.curve_us(kind, gpu)
        for batch in range(min(curve), max(curve) + 1):
            costs = (one.duration_us(kind, gpu, batch) for one in (profile, old, new))
            tasks.append(TaskCost(kind=kind, gpu_kind=gpu, batch_size=batch, samples_us=(_scaled(kind, *costs),)))
    before, after = old.sizes_bytes, new.sizes_bytes
    sizes = {kind: _ratio(size, before[kind], after[kind]) for kind, size in profile.sizes_bytes.items()}
    return profile.model_copy(
        update={
            "name": f"{profile.name}-scaled",
            "provenance": "predicted",
            "source": f"{profile.provenance}, scaled by roofline to {_described(workload)}. {profile.source}",
            "settings": workload.cost_settings(),
            "sizes_bytes": sizes,
            "tasks": tuple(tasks),
        }
    )


def _scaled(kind: str, known: int, old: int, new: int) -> int:
    return known + new - old if kind == "update" else _ratio(known, old, new)


def _ratio(known: int, old: int, new: int) -> int:
    return round(known * new / old)


def _described(workload: Workload) -> str:
    return f"{workload.policy}, {workload.latent_frames} latent frames, {workload.resolution}"


# -- settings --------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Setting(Case):
    """A case moved away from the fitted point."""

    mini_batches: int
    latent_frames: int
    resolution: str
    policy: str

    @classmethod
    def default(cls, pair: str) -> Setting:
        """The pair's own workload, which its costs were fitted at."""
        own = load_workload(pair)
        names = {pixels: name for name, pixels in RESOLUTIONS.items()}
        return cls(pair, own.candidates, own.mini_batches, own.latent_frames, names[own.resolution], own.policy)

    def workload(self, schedule: str) -> Workload:
        """The workload as ``schedule`` runs it; ``InputError`` where it cannot be."""
        changes: dict[str, object] = {
            "mini_batches": self.mini_batches,
            "latent_frames": self.latent_frames,
            "resolution": self.resolution,
        }
        workload = super().workload(schedule)
        if self.policy != workload.policy:
            model = find_model(self.policy)
            changes |= {"policy": model.name, "vae": VAES.get(model.name, workload.vae)}
            changes |= {"window_frames": model.window_frames, "sink_frames": model.sink_frames}
        return workload.with_(**changes)

    def __str__(self) -> str:
        return ", ".join(f"{field.name}={getattr(self, field.name)}" for field in fields(self))


def sweeps() -> dict[str, tuple[Setting, ...]]:
    """Sweep -> its settings over the four pairs, ``refused`` ones left out; some stand in several sweeps.

    Everything a sweep does not move is the pair's default, but for DanceGRPO's mini-batches: those of 24 candidates.
    """
    return {sweep: tuple(one for one in wanted if refusal(one) is None) for sweep, wanted in _wanted().items()}


def refused() -> dict[Setting, str]:
    """Settings of the sweeps that cannot be, and why."""
    return {one: why for wanted in _wanted().values() for one in wanted if (why := refusal(one)) is not None}


@cache
def refusal(setting: Setting) -> str | None:
    """Why a setting cannot be; None if it can."""
    try:
        setting.workload(SCHEDULE)
    except InputError as error:
        return str(error)
    return None


def _wanted() -> dict[str, list[Setting]]:
    found: dict[str, list[Setting]] = {sweep: [] for sweep in VALUES}
    for sweep, values in VALUES.items():
        for default in map(Setting.default, PAIRS):
            wide = sweep == "mini_batches" and default.pair.startswith("dancegrpo")
            start = replace(default, candidates=24) if wide else default
            own = (default.policy,) if sweep == "policy" else ()
            found[sweep] += [replace(start, **{sweep: value}) for value in (*own, *values)]
    return found


# -- predictions -----------------------------------------------------------------------------------------------


def predict(settings: Iterable[Setting], tick: Progress = lambda _: None) -> list[Row]:
    """One row per setting and schedule, with the ``COLUMNS``; settings given twice are predicted once.

    All schedules at 4 actor and 2 reward GPUs, ``stagebreaker`` at its best placement there. ``tick(1)`` per setting.
    """
    rows: list[Row] = []
    for setting in dict.fromkeys(settings):
        rows += _rows(setting, steps_us(setting))
        tick(1)
    return rows


def steps_us(setting: Setting, profile: Profile | None = None) -> dict[str, int]:
    """Schedule -> us of one step; ``profile``: the pair's fitted one, scaled, unless it is given.

    Stagebreaker's is the better of a gathered batch with tasks moved and nothing moved: no planner would choose less.
    """
    if profile is None:
        fitted = shipped_profile(f"fitted-{setting.pair}")
        profile = scaled_profile(fitted, load_workload(setting.pair), setting.workload(SCHEDULE))
    found = {}
    for name in COMPARED:
        still = Placement(schedule=name, actors=ACTORS, rewards=REWARDS, scoring="on_arrival")
        placement = best_placement(setting, profile) if name == SCHEDULE else still
        found[name] = step_of(setting, placement, profile).makespan_us
    found[SCHEDULE] = min(found[SCHEDULE], found[NOTHING_MOVED])
    return found


def _rows(setting: Setting, steps: dict[str, int]) -> list[Row]:
    common: Row = {field.name: getattr(setting, field.name) for field in fields(setting)}
    return [
        {
            **common,
            "schedule": name,
            "step_us": step,
            "speedup_vs_colocated": round(steps["colocated"] / step, 4),
            "speedup_vs_async_reward": round(steps["async_reward"] / step, 4),
        }
        for name, step in steps.items()
    ]


def predictions(tick: Progress = lambda _: None) -> pd.DataFrame:
    """Every setting of every sweep, each once, in the order of the sweeps."""
    return frame(predict(all_settings(), tick))


def all_settings() -> tuple[Setting, ...]:
    """The settings of all sweeps, each once."""
    return tuple(dict.fromkeys(one for settings in sweeps().values() for one in settings))


def frame(rows: Iterable[Row]) -> pd.DataFrame:
    """Rows as a tidy table."""
    return pd.DataFrame(list(rows), columns=list(COLUMNS))


def of_sweep(table: pd.DataFrame, sweep: str) -> pd.DataFrame:
    """The rows of ``table`` that belong to a sweep, in its order."""
    keys = frame({field.name: getattr(one, field.name) for field in fields(one)} for one in sweeps()[sweep])
    names = [field.name for field in fields(Setting)]
    return keys[names].merge(table, on=names, how="left", validate="one_to_many")


def summary(table: pd.DataFrame, schedule: str = SCHEDULE) -> list[Row]:
    """Per value of each sweep: low and high over the pairs of a schedule's speedups, and how many pairs there are."""
    found: list[Row] = []
    for sweep in VALUES:
        chosen = of_sweep(table, sweep)
        chosen = chosen[chosen["schedule"] == schedule]
        values = chosen["policy"].map(_size) if sweep == "policy" else chosen[sweep]
        for value, rows in chosen.groupby(values, sort=True):
            row: Row = {"sweep": sweep, "value": str(value), "pairs": len(rows)}
            for over in ("colocated", "async_reward"):
                speedups = rows[f"speedup_vs_{over}"]
                row |= {f"vs_{over}_low": float(speedups.min()), f"vs_{over}_high": float(speedups.max())}
            found.append(row)
    return found


def to_csv(table: pd.DataFrame) -> str:
    """The table as CSV, speedups with four decimals."""
    return table.to_csv(index=False, float_format="%.4f", lineterminator="\n")


def sweep_figure(table: pd.DataFrame, sweep: str) -> Figure:
    """Speedups along one sweep: a column per pair, over colocated above and over async_reward below."""
    from stagebreaker.sim.figures import plot_sweep

    rows = of_sweep(table, sweep)
    rows = rows.assign(policy=rows["policy"].map(_size))
    pairs = rows["pair"].nunique()
    figure = Figure(figsize=(0.4 + 1.75 * pairs, 4.6), layout="constrained")
    panels = figure.subplots(2, pairs, sharey="row", squeeze=False)
    for axes, over in zip(panels, ("colocated", "async_reward"), strict=True):
        plot_sweep(rows, ax=axes, x=sweep, y=f"speedup_vs_{over}")
        for ax in axes[1:]:
            ax.set_ylabel("")
    for legend in figure.legends[1:]:  # both rows have the same
        legend.remove()
    return figure


def draw(table: pd.DataFrame, folder: Path) -> None:
    """Write ``predictions-<sweep>.png`` for every sweep into ``folder``."""
    from stagebreaker.sim.plot import save_figure

    for sweep in VALUES:
        if len(of_sweep(table, sweep)):
            save_figure(sweep_figure(table, sweep), folder / f"predictions-{sweep.replace('_', '-')}.png")


def _size(policy: str) -> str:
    return "5B" if policy == LARGE else "1.3B"
