"""Explaining a plan: what one change would do, by hand and by simulation; differences of two plans."""

import pytest
from builders import profile_of, workload_of

from stagebreaker.placement.explain import differences, explanation, one_change
from stagebreaker.placement.planner import make_plan
from stagebreaker.sim.schedules import SCHEDULES
from stagebreaker.sim.workload import Cluster

PROFILE = profile_of("continuous", t0=2, t1=1, generate=4, vae_decode=1, grad_replay=12, update=1)
WORKLOAD = workload_of(candidates=6, group_size=3, mini_batches=2)


@pytest.fixture(scope="module")
def plan():
    return make_plan(WORKLOAD, Cluster.equal(3, "gpu"), PROFILE).plan


@pytest.mark.parametrize("name", SCHEDULES)
def test_every_gpu_is_accounted_for(plan, name):
    found = explanation(plan, name)
    assert found["step_us"] == plan.schedules[name].step_us
    for gpu in found["gpus"]:
        assert gpu["busy_us"] + gpu["overhead_us"] + sum(gpu["idle_us"].values()) == found["step_us"]
    assert sum(found["critical_path_us"].values()) == found["step_us"]
    assert found["binds"] in {gpu["gpu"] for gpu in found["gpus"]}


def test_no_single_count_makes_a_certified_placement_better(plan):
    """The certificate is about counts and splits under one scoring mode; only another mode could be better."""
    found = one_change(plan, "stagebreaker")
    step = plan.schedules["stagebreaker"].step_us
    assert [us for _, us in found] == sorted(us for _, us in found)
    assert all(us >= step for what, us in found if not what.startswith("scoring"))
    placement = plan.schedules["stagebreaker"].placement
    assert sum("GPUs" in what for what, _ in found) == (placement.actors > 1) + (placement.rewards > 1)
    assert sum(what.startswith("scoring") for what, _ in found) == 2
    kinds = [what for what, _ in found if "moved" in what]
    assert len(kinds) >= 3
    assert all("decodes" in what or "training tasks of mini-batch" in what for what in kinds)


def test_baselines_can_change_their_scoring_and_split_alone(plan):
    assert one_change(plan, "colocated") == []
    assert {what for what, _ in one_change(plan, "merged_replay") if "moved" in what} == set()
    assert len(one_change(plan, "merged_replay")) >= 3


def test_split_candidates_go_back_as_a_whole():
    finer = make_plan(WORKLOAD, Cluster.equal(3, "gpu"), PROFILE, finer=True)
    changes = dict(one_change(finer.plan, "stagebreaker"))
    assert changes["no candidate split"] >= finer.finer.step_us
    assert not any("moved" in what for what in changes)


def test_plans_differ_where_they_differ(plan):
    assert differences(plan, plan) == []
    other = make_plan(WORKLOAD.with_(mini_batches=1), Cluster.equal(4, "gpu"), PROFILE).plan
    found = {what: (one, two) for what, one, two in differences(plan, other)}
    assert found["workload.mini_batches"] == ("2", "1")
    assert found["GPUs"] == ("3", "4")
    assert found["stagebreaker: step, us"] == (
        str(plan.schedules["stagebreaker"].step_us),
        str(other.schedules["stagebreaker"].step_us),
    )
    assert "profile" not in found
    assert "workload.candidates" not in found
