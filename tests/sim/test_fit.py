"""The fit to the published results: its parts on known costs, and what ships as its result."""

from dataclasses import replace

import numpy as np
import pytest

from stagebreaker.placement.reproduce import best_placement
from stagebreaker.sim.fit import (
    ANCHOR,
    ANCHOR_US,
    PARAMETERS,
    Problem,
    _gauss_newton,
    _polish,
    costs_of,
    problem_at,
    profile_with,
    report,
    residuals,
    shipped_start,
    tolerance,
)
from stagebreaker.sim.published import PAIRS, all_cases, published, shipped_profile, speedup, steps_of

QUIET = str.strip  # takes a line, prints nothing


@pytest.fixture(scope="module")
def shipped():
    """The fit's problem at the shipped fitted profiles, and where in it they stand."""
    return problem_at({pair: shipped_profile(f"fitted-{pair}") for pair in PAIRS}, best_placement)


@pytest.fixture(scope="module")
def found(shipped):
    return report(*shipped)


def test_tolerances():
    assert tolerance("fig16.x", 0.13) == 0.02
    assert tolerance("fig16.x", 0.64) == pytest.approx(0.032)
    assert tolerance("fig9.x", 1.4) == pytest.approx(0.042)


def test_parameters_are_shared_as_stated():
    assert ANCHOR not in PARAMETERS
    assert len(PARAMETERS) == len(set(PARAMETERS)) == 16
    shipped = {pair: shipped_profile(f"fitted-{pair}") for pair in PAIRS}
    gpu = shipped[PAIRS[0]].gpu_kinds[0].name
    for a, b in (("dancegrpo-urflex", "dancegrpo-vrt"), ("kvpo-urflex", "kvpo-vrt")):
        for kind in ("generate", "vae_decode", "loss_replay", "old_replay", "ref_replay", "grad_replay", "update"):
            assert shipped[a].duration_us(kind, gpu) == shipped[b].duration_us(kind, gpu)
    for judge in ("urflex", "vrt"):
        assert shipped[f"dancegrpo-{judge}"].curve_us("score", gpu) == shipped[f"kvpo-{judge}"].curve_us("score", gpu)
    assert len({p.duration_us("switch", gpu) for p in shipped.values()}) == 1


@pytest.mark.parametrize("pair", PAIRS)
def test_costs_survive_the_way_into_a_profile_and_back(pair):
    start, templates = shipped_start()
    costs = {name: value * (1 + n / 100) for n, (name, value) in enumerate(start.items())}
    made = profile_with(costs, pair, templates[pair])
    for name, value in costs_of({pair: made}).items():
        assert value == pytest.approx(costs[name], abs=1), name
    assert made.sizes_bytes == templates[pair].sizes_bytes
    assert made.settings == templates[pair].settings


@pytest.mark.parametrize("pair", PAIRS)
def test_what_ships_is_marked_as_fitted_and_names_its_anchor(pair):
    profile = shipped_profile(f"fitted-{pair}")
    assert (profile.name, profile.provenance, profile.workload) == (f"fitted-{pair}", "fitted", pair)
    assert "7.5 s" in profile.source
    if pair.startswith("dancegrpo"):
        assert profile.duration_us("generate", profile.gpu_kinds[0].name) == ANCHOR_US


def test_a_common_factor_changes_no_residual():
    """Ratios fix no scale: that is why one cost is the anchor."""
    start, templates = shipped_start()
    placements = {case: best_placement(case, templates[case.pair]) for case in all_cases()[:2]}
    cases = tuple(placements)

    def steps(factor):
        costs = {name: value * factor for name, value in start.items()}
        made = {pair: profile_with(costs, pair, templates[pair]) for pair in PAIRS}
        fast = {
            pair: p.model_copy(update={"link": p.link.model_copy(update={"bytes_per_s": 10**15, "latency_us": 0})})
            for pair, p in made.items()
        }
        return {case: steps_of(case, placements[case], fast[case.pair]) for case in cases}

    one, ten = steps(1), steps(10)
    for case in cases:
        for schedule in ("colocated", "merged_replay", "stagebreaker"):
            ratio = speedup(one[case], schedule, "async_reward")
            assert speedup(ten[case], schedule, "async_reward") == pytest.approx(ratio, rel=1e-3)


class Valley(Problem):
    """A curved problem with a known answer in place of the simulator; the first residual has a kink."""

    answer = np.linspace(-0.3, 0.3, len(PARAMETERS))

    def __init__(self):
        super().__init__(dict.fromkeys(PARAMETERS, 1.0), {}, {})

    def vector(self, x):
        off = 100 * (np.exp(x) - np.exp(self.answer))
        return np.concatenate([np.maximum(off[:1], 2 * off[:1]), off[1:], off[1:] - off[:-1]])


def test_the_searches_find_a_known_answer():
    problem, lines = Valley(), []
    start = np.zeros(len(PARAMETERS))
    rough = _gauss_newton(problem, start, lines.append)
    fine = _polish(problem, rough, lines.append)
    assert problem.objective(fine) <= problem.objective(rough) < problem.objective(start)
    assert fine == pytest.approx(problem.answer, abs=0.01)
    assert lines[0].startswith("round 1: objective ")


def test_a_search_that_cannot_improve_stays():
    problem = Valley()
    at = _polish(problem, _gauss_newton(problem, problem.answer, QUIET), QUIET)
    assert _polish(problem, at, QUIET) == pytest.approx(at, abs=0.002)


def test_rows_made_from_known_costs_leave_no_residual(shipped):
    problem, x = shipped
    rows = [replace(row, low=low, high=high) for row in problem.rows for low, high in (row.read(problem.steps(x)),)]
    made = Problem(problem.start_us, problem.templates, problem.placements, rows)
    assert np.all(made.vector(x) == 0)
    assert np.any(made.vector(x + 0.01) != 0)


def test_what_ships_is_a_local_minimum(shipped):
    problem, x = shipped
    at = problem.objective(x)
    for axis, name in enumerate(PARAMETERS):
        for step in (-0.02, 0.02):
            moved = x.copy()
            moved[axis] += step
            assert problem.objective(moved) > at - 0.1, (name, step)


def test_every_row_has_its_residuals(found):
    ends = {(one.id, one.end) for one in found.residuals}
    for row in published():
        assert {end for id_, end in ends if id_ == row.id} in ({"value"}, {"low", "high"})
    assert len(ends) == len(found.residuals)


def test_the_report_says_what_the_data_identify(found):
    assert set(found.identified) == set(found.sensitivity) == set(PARAMETERS)
    assert all(-1e-9 <= value <= 1 + 1e-9 for value in found.identified.values())
    assert found.identified["dancegrpo.grad_replay"] > 0.95
    assert found.identified["dancegrpo.vae_decode"] > 0.95
    assert found.identified["kvpo.update"] < 0.5
    assert {"kvpo.old_replay", "kvpo.update"} & {name for direction in found.loose for name in direction}
    assert list(found.singular_values) == sorted(found.singular_values, reverse=True)


def test_the_redundant_replay_of_figure_3_stays_a_residual(found):
    misses = [one.in_tolerances for one in found.residuals if one.id == "fig3.redundant_replay_share"]
    assert max(misses) < -5
    assert not any(one.used_in_fit for one in found.residuals if one.id == "fig3.redundant_replay_share")


def test_residuals_are_in_tolerances(shipped):
    problem, x = shipped
    for one in residuals(problem.steps(x), published()):
        assert one.in_tolerances * tolerance(one.id, one.published) == pytest.approx(one.reproduced - one.published)
