"""Splitting candidates by step: never worse than the count space, exact, above its bound, and runnable."""

import pytest
from builders import profile_of, workload_of
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from strategies import profiles, workloads

from stagebreaker.placement.bounds import StepCosts, any_schedule_us
from stagebreaker.placement.finer import refine, starts
from stagebreaker.placement.planner import make_plan
from stagebreaker.placement.search import search
from stagebreaker.placement.space import Space
from stagebreaker.sim.engine import simulate
from stagebreaker.sim.plan import SCORING
from stagebreaker.sim.schedules import build
from stagebreaker.sim.workload import Cluster

RANDOM = settings(deadline=None, suppress_health_check=list(HealthCheck), max_examples=25)
COSTS = {"generate": 4, "vae_decode": 1, "grad_replay": 12, "context_rebuild": 0, "update": 1}


def refined(workload, profile, gpus):
    cluster = Cluster.equal(gpus, profile.gpu_kinds[0].name)
    results = [search(workload, cluster, profile, Space.of(workload, gpus, None, (mode,))) for mode in SCORING]
    return refine(workload, cluster, profile, starts(results)), min(r.best.step_us for r in results), cluster


def test_nothing_is_split_where_the_last_score_decides():
    profile = profile_of("continuous", t0=1000, **COSTS)
    found, whole_us, _ = refined(workload_of(candidates=3, group_size=3, trained_steps=3), profile, 3)
    assert found.step_us == whole_us
    assert found.placement.splits == ()


def test_a_later_mini_batch_in_parts():
    """Two candidates a mini-batch on three GPUs: 12 s whole, 8 s in thirds, two steps on each GPU."""
    profile = profile_of("continuous", **COSTS)
    workload = workload_of(candidates=4, group_size=4, mini_batches=2, trained_steps=3)
    found, whole_us, cluster = refined(workload, profile, 3)
    assert whole_us - found.step_us >= 4_000_000
    later = [split for split in found.placement.splits if split.candidate >= 2]
    assert len({lane for split in later for lane in split.lanes}) == 3
    graph, assignment = build(workload, found.placement)
    again = simulate(graph, assignment, profile, cluster, workload.trained_steps)
    assert again.makespan_us == found.step_us


def test_a_rebuild_that_costs_more_than_it_saves_is_not_paid():
    profile = profile_of("continuous", **{**COSTS, "context_rebuild": 11})
    workload = workload_of(candidates=4, group_size=4, mini_batches=2, trained_steps=3)
    found, whole_us, _ = refined(workload, profile, 3)
    assert all(len(split.lanes) == 1 for split in found.placement.splits)
    assert found.step_us <= whole_us


@RANDOM
@given(workloads(), profiles(), st.integers(2, 4))
def test_never_worse_and_never_below_the_bound(workload, profile, gpus):
    if workload.candidates > 6:
        workload = workload.with_(candidates=workload.group_size, mini_batches=1, failed_rewards=())
    found, whole_us, cluster = refined(workload, profile, gpus)
    assert found.whole_us == whole_us
    assert found.step_us <= whole_us
    graph, assignment = build(workload, found.placement)
    assert simulate(graph, assignment, profile, cluster, workload.trained_steps).makespan_us == found.step_us
    bound = any_schedule_us(workload, gpus, StepCosts(workload, profile, cluster.gpus[0].kind, divisible=True))
    assert bound <= found.step_us
    assert bound <= any_schedule_us(workload, gpus, StepCosts(workload, profile, cluster.gpus[0].kind))


def test_the_plan_carries_it():
    profile = profile_of("continuous", t0=2, t1=1, **COSTS)
    workload = workload_of(candidates=6, group_size=3, mini_batches=2, trained_steps=3)
    cluster = Cluster.equal(3, "gpu")
    plain, finer = (make_plan(workload, cluster, profile, finer=finer) for finer in (False, True))
    assert finer.finer is not None
    assert plain.finer is None
    ours = finer.plan.schedules["stagebreaker"]
    assert ours.step_us == finer.finer.step_us < plain.plan.schedules["stagebreaker"].step_us
    assert ours.placement.splits
    assert finer.any_schedule_bound_us <= ours.step_us
    assert finer.certificate.step_us >= ours.step_us  # it is about whole candidates
    others = [name for name in plain.plan.schedules if name != "stagebreaker"]
    assert {n: plain.plan.schedules[n].best_split_step_us for n in others} == {
        n: finer.plan.schedules[n].best_split_step_us for n in others
    }


@pytest.mark.parametrize("finer", [False, True])
def test_the_same_input_gives_the_same_plan(finer):
    profile = profile_of("continuous", t0=2, t1=1, **COSTS)
    workload = workload_of(candidates=4, group_size=2, mini_batches=2, trained_steps=3)
    plans = [make_plan(workload, Cluster.equal(3, "gpu"), profile, finer=finer).plan.to_json() for _ in range(2)]
    assert plans[0] == plans[1]
