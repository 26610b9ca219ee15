"""Fits the unknown task costs to the published ratios, by simulating.

Costs of the policy are shared by the two judges of an algorithm, costs of a judge by the two algorithms, one engine
switch by all. Ratios fix no scale, so one cost is the anchor: a rollout of 21 latent frames taken as 7.5 s. Damped
Gauss-Newton on logarithms, pulled weakly towards the costs it starts from, so that what the data do not identify stays
there; a pattern search ends it, since a low or high over pairs has kinks. Figures 9 and 16 take part whole: agreement
with them is in-sample. It does not know whether a row can be met at all; every residual is reported.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from stagebreaker.profiles.table import Profile, TaskCost
from stagebreaker.sim.plan import Placement
from stagebreaker.sim.published import (
    PAIRS,
    Case,
    Published,
    Steps,
    all_cases,
    published,
    shipped_profile,
    steps_of,
)

Vector = NDArray[np.float64]
Progress = Callable[[str], None]
Search = Callable[[Case, Profile], Placement]
"""Finds the placement that stagebreaker rows are about (``placement.reproduce.best_placement``)."""

ANCHOR = "dancegrpo.generate"
ANCHOR_US = 7_500_000
"""One rollout of 21 latent frames; about 990 TFLOP."""
POLICY_KINDS = ("generate", "vae_decode", "loss_replay", "old_replay", "grad_replay", "update")
ALGORITHMS, JUDGES = ("dancegrpo", "kvpo"), ("urflex", "vrt")
PARAMETERS = (
    *(f"{a}.{kind}" for a in ALGORITHMS for kind in POLICY_KINDS if f"{a}.{kind}" != ANCHOR),
    *(f"{judge}.{part}" for judge in JUDGES for part in ("score_first", "score_more")),
    "switch",
)
"""What is fitted, each in us: t(b) = score_first + (b - 1) score_more. A reference replay costs an old replay."""
UNIT = Case("dancegrpo-vrt", 24)
"""Its async_reward step is the unit in which fitted costs are compared."""
PULL = 1.0
"""Weight of the logarithm of a cost over its start, where 1 is a residual at its tolerance."""


@dataclass(frozen=True)
class Residual:
    """One end of a published row: what it says and what the fitted costs give."""

    id: str
    end: str
    published: float
    reproduced: float
    used_in_fit: bool

    @property
    def in_tolerances(self) -> float:
        """The miss in tolerances of its row."""
        return (self.reproduced - self.published) / tolerance(self.id, self.published)


@dataclass(frozen=True)
class Fit:
    """Fitted costs, what they leave, and what the data say about each."""

    costs_us: dict[str, float]
    unit_us: int
    residuals: tuple[Residual, ...]
    objective: float
    singular_values: tuple[float, ...]
    sensitivity: dict[str, float]
    """Parameter -> norm of the change of all residuals, in tolerances, for its cost times e."""
    identified: dict[str, float]
    """Parameter -> share of it (0 to 1) that the data and not the start decide."""
    loose: tuple[dict[str, float], ...]
    """Directions (of unit length, in logarithms of costs) along which a factor e moves no residual by a tolerance."""


def tolerance(row: str, value: float) -> float:
    """How close is close: 5 % of a number of Figure 16 (0.02 for a share under 0.2), 3 % of an end of a range."""
    if not row.startswith("fig16"):
        return 0.03 * value
    return 0.02 if value < 0.2 else 0.05 * value


def costs_of(profiles: Mapping[str, Profile]) -> dict[str, float]:
    """The parameters' values, in us, in a set of profiles (pair -> profile)."""
    costs: dict[str, float] = {}
    for pair, profile in profiles.items():
        algorithm, judge = pair.split("-")
        gpu = profile.gpu_kinds[0].name
        costs |= {f"{algorithm}.{kind}": float(profile.duration_us(kind, gpu)) for kind in POLICY_KINDS}
        costs[f"{judge}.score_first"] = float(profile.duration_us("score", gpu, 1))
        costs[f"{judge}.score_more"] = (profile.duration_us("score", gpu, 64) - costs[f"{judge}.score_first"]) / 63
        costs["switch"] = float(profile.duration_us("switch", gpu))
    return costs


def profile_with(costs_us: Mapping[str, float], pair: str, template: Profile) -> Profile:
    """``template`` (sizes, link, hardware) with these costs; a context rebuild keeps its share of a grad_replay."""
    algorithm, judge = pair.split("-")
    gpu = template.gpu_kinds[0].name
    rebuild = template.duration_us("context_rebuild", gpu) / template.duration_us("grad_replay", gpu)

    def cost(task: TaskCost) -> float:
        if task.kind == "score":
            return costs_us[f"{judge}.score_first"] + (task.batch_size - 1) * costs_us[f"{judge}.score_more"]
        if task.kind == "context_rebuild":
            return rebuild * costs_us[f"{algorithm}.grad_replay"]
        kind = "old_replay" if task.kind == "ref_replay" else task.kind
        unknown = task.samples_us[0]  # too short to show in the published numbers
        return costs_us.get(f"{algorithm}.{kind}", costs_us.get(kind, unknown))

    tasks = tuple(task.model_copy(update={"samples_us": (round(cost(task)),)}) for task in template.tasks)
    return template.model_copy(
        update={
            "name": f"fitted-{pair}",
            "provenance": "fitted",
            "source": _source(algorithm, judge),
            "tasks": tasks,
        }
    )


def _source(algorithm: str, judge: str) -> str:
    policy = "DanceGRPO's costs scaled by FLOPs" if algorithm == "kvpo" else "an earlier fit to Figure 16 alone"
    scoring = "the bandwidth model of an 8B judge" if judge == "urflex" else "that fit"
    return (
        f"Fitted jointly over the four pairs to the published ratios of Figures 9 and 16, by simulating 4+2 GPUs "
        f"(in-sample; stagebreaker-profile fit). The anchor of the absolute scale is one 21-latent-frame rollout taken "
        f"as {ANCHOR_US / 1e6} s. What the ratios do not identify stays near where the fit starts: {policy}, and for "
        f"the judge {scoring}."
    )


class Problem:
    """Residuals of the rows used in the fit as a function of log costs over ``start_us``, at fixed placements."""

    def __init__(
        self,
        start_us: Mapping[str, float],
        templates: Mapping[str, Profile],
        placements: Mapping[Case, Placement],
        rows: Iterable[Published] | None = None,
    ) -> None:
        self.start_us, self.templates, self.placements = dict(start_us), dict(templates), dict(placements)
        self.rows = tuple(row for row in published() if row.used_in_fit) if rows is None else tuple(rows)
        self._steps: dict[tuple[Case, tuple[TaskCost, ...]], Steps] = {}

    def costs_us(self, x: Vector) -> dict[str, float]:
        """Costs at ``x``; the anchor does not move."""
        logs = dict(zip(PARAMETERS, x.tolist(), strict=True))
        return {name: value * math.exp(logs.get(name, 0.0)) for name, value in self.start_us.items()}

    def profiles(self, x: Vector) -> dict[str, Profile]:
        """Pair -> profile at ``x``."""
        costs = self.costs_us(x)
        return {pair: profile_with(costs, pair, self.templates[pair]) for pair in PAIRS}

    def steps(self, x: Vector) -> dict[Case, Steps]:
        """All timelines at ``x``."""
        profiles = self.profiles(x)
        return {case: self._case(case, profiles[case.pair]) for case in all_cases()}

    def _case(self, case: Case, profile: Profile) -> Steps:
        """A cost of one algorithm or judge leaves the other cases as they were: the last few are kept."""
        key = (case, profile.tasks)
        if key not in self._steps:
            while len(self._steps) >= 4 * len(self.placements):
                del self._steps[next(iter(self._steps))]
            self._steps[key] = steps_of(case, self.placements[case], profile)
        return self._steps[key]

    def vector(self, x: Vector) -> Vector:
        """Residuals in tolerances."""
        return np.array([one.in_tolerances for one in residuals(self.steps(x), self.rows)])

    def objective(self, x: Vector) -> float:
        """Sum of squares, the pull to the start included."""
        return float(np.sum(self.vector(x) ** 2) + PULL**2 * np.sum(x**2))

    def jacobian(self, x: Vector, step: float = 1e-2) -> Vector:
        """Central differences of ``vector``, one column a parameter."""
        eye = np.eye(len(x)) * step
        return np.stack([(self.vector(x + e) - self.vector(x - e)) / (2 * step) for e in eye], axis=1)


def residuals(steps: Mapping[Case, Steps], rows: Iterable[Published]) -> tuple[Residual, ...]:
    """What the timelines give for ``rows``: one entry per number, two for a range."""
    found: list[Residual] = []
    for row in rows:
        low, high = row.read(steps)
        if row.low == row.high:
            found.append(Residual(row.id, "value", row.low, low, row.used_in_fit))
        else:
            found.append(Residual(row.id, "low", row.low, low, row.used_in_fit))
            found.append(Residual(row.id, "high", row.high, high, row.used_in_fit))
    return tuple(found)


def shipped_start() -> tuple[dict[str, float], dict[str, Profile]]:
    """Where the fit starts: costs and templates of the provisional profiles, the anchor at its value."""
    templates = {pair: shipped_profile(f"provisional-{pair}") for pair in PAIRS}
    return {**costs_of(templates), ANCHOR: float(ANCHOR_US)}, templates


def problem_at(profiles: Mapping[str, Profile], search: Search) -> tuple[Problem, Vector]:
    """The fit's problem at placements searched for ``profiles``, and where in it these profiles stand."""
    start, templates = shipped_start()
    costs = costs_of(profiles)
    placements = {case: search(case, profiles[case.pair]) for case in all_cases()}
    x = np.array([math.log(costs[name] / start[name]) for name in PARAMETERS])
    return Problem(start, templates, placements), x


def fit(search: Search, say: Progress = lambda _: None, rounds: int = 4) -> Fit:
    """Fit all parameters from the provisional profiles. Takes about a minute or two.

    Placements are searched again after each of ``rounds`` and held while costs move; it ends when they stay.
    """
    start, templates = shipped_start()
    problem, x = problem_at({pair: profile_with(start, pair, templates[pair]) for pair in PAIRS}, search)
    for _ in range(rounds):
        x = _gauss_newton(problem, x, say)
        again, there = problem_at(problem.profiles(x), search)
        if again.placements == problem.placements:
            break
        problem, x = again, there
    return report(problem, _polish(problem, x, say))


def fitted_profiles(fitted: Fit) -> dict[str, Profile]:
    """Pair -> the profile to save as ``fitted-<pair>.json``."""
    _, templates = shipped_start()
    return {pair: profile_with(fitted.costs_us, pair, templates[pair]) for pair in PAIRS}


def report(problem: Problem, x: Vector) -> Fit:
    """Residuals and identifiability at ``x``."""
    steps, jacobian = problem.steps(x), problem.jacobian(x)
    normal = jacobian.T @ jacobian
    decided = np.diag(np.linalg.solve(normal + PULL**2 * np.eye(len(x)), normal))
    _, singular, directions = np.linalg.svd(jacobian)
    return Fit(
        costs_us=problem.costs_us(x),
        unit_us=steps[UNIT]["async_reward"].makespan_us,
        residuals=residuals(steps, published()),
        objective=problem.objective(x),
        singular_values=tuple(singular.tolist()),
        sensitivity=dict(zip(PARAMETERS, np.linalg.norm(jacobian, axis=0).tolist(), strict=True)),
        identified=dict(zip(PARAMETERS, decided.tolist(), strict=True)),
        loose=tuple(_parts(direction) for s, direction in zip(singular, directions, strict=True) if s < 1),
    )


def _parts(direction: Vector) -> dict[str, float]:
    """The parameters that make up most of a direction, largest first."""
    parts = dict(zip(PARAMETERS, direction.tolist(), strict=True))
    return {name: parts[name] for name in sorted(parts, key=lambda n: -abs(parts[n])) if abs(parts[name]) > 0.1}


def _gauss_newton(problem: Problem, x: Vector, say: Progress, rounds: int = 8) -> Vector:
    """Damped steps; the damping grows when a step does not help."""
    best, damping = problem.objective(x), 1.0
    for count in range(rounds):
        before = best
        jacobian, vector = problem.jacobian(x), problem.vector(x)
        normal = jacobian.T @ jacobian + PULL**2 * np.eye(len(x))
        gradient = jacobian.T @ vector + PULL**2 * x
        for _ in range(8):
            trial = x - np.linalg.solve(normal + damping * np.diag(np.diag(normal)), gradient)
            found = problem.objective(trial)
            if found < best:
                x, best, damping = trial, found, damping / 4
                break
            damping *= 4
        say(f"round {count + 1}: objective {best:.3f}")
        if best > before - 1e-2:
            break
    return x


def _polish(problem: Problem, x: Vector, say: Progress, first: float = 0.04, last: float = 0.002) -> Vector:
    """Pattern search along each axis, halving the step where none helps."""
    best, step = problem.objective(x), first
    while step >= last:
        before = best
        for axis in range(len(x)):
            for sign in (1.0, -1.0):
                trial = x.copy()
                trial[axis] += sign * step
                found = problem.objective(trial)
                if found < best:
                    x, best = trial, found
                    break
        if best > before - 1e-2:
            step /= 2
        say(f"step {step:.4f}: objective {best:.3f}")
    return x
