"""Lower bounds: none above what the engine simulates, whatever the costs; and tight where the answer is known."""

import pytest
from builders import placement_of, profile_of, simulated, workload_of
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from strategies import SERVINGS, profiles, workloads

from stagebreaker.placement.bounds import BOUNDS, StepCosts, any_schedule_us, region_bound
from stagebreaker.placement.space import Region
from stagebreaker.profiles.table import TaskCost
from stagebreaker.sim.dispatch import GraphIndex
from stagebreaker.sim.engine import Costs, step_us
from stagebreaker.sim.plan import SCORING, Placement
from stagebreaker.sim.schedules import SCHEDULES, Assigner, build, build_graph
from stagebreaker.sim.workload import Cluster

RANDOM = settings(deadline=None, suppress_health_check=list(HealthCheck))


@st.composite
def costs(draw):
    """A drawn profile; half of them with a judge whose curve has a dip, as a measured one may."""
    drawn = draw(profiles())
    if draw(st.booleans()):
        size, us = draw(st.integers(2, 4)), draw(st.integers(0, 40))
        dip = TaskCost(kind="score", gpu_kind="kind0", batch_size=size, samples_us=(us,))
        drawn = drawn.model_copy(update={"tasks": (*drawn.tasks, dip)})
    return drawn


@st.composite
def regions(draw):
    """A workload on one GPU split under one scoring mode."""
    return Region(draw(workloads()), draw(st.integers(1, 3)), draw(st.integers(1, 3)), draw(st.sampled_from(SCORING)))


def counts(draw, region):
    """One placement of the region."""
    w = region.workload
    sizes = [len(w.mini_batch_members(m)) for m in range(w.mini_batches)]
    train = tuple(draw(st.integers(0, n)) for n in sizes)
    forward = tuple(draw(st.integers(0, n)) for n in region.forward_only)
    return region.base().model_copy(
        update={
            "vae_moved": draw(st.integers(0, w.candidates)),
            "train_moved": train,
            "old_moved": forward if w.old_logprob_source != "rollout" else (),
            "ref_moved": forward if w.reference_replay else (),
        }
    )


def no_bound_above_a_placement(region, profile, data, placements):
    c = StepCosts(region.workload, profile, "kind0")
    bounds = region_bound(region, c)
    assert set(bounds) == set(BOUNDS)
    gpus = region.actors + region.rewards
    graph = build_graph(region.workload, region.base())
    index = GraphIndex(graph, profile)
    times = Costs(graph, profile, Cluster.equal(gpus, "kind0"), region.workload.trained_steps)
    assign = Assigner(region.workload, region.base(), graph)
    anything = any_schedule_us(region.workload, gpus, c)
    for _ in range(placements):
        placement = counts(data.draw, region)
        found = step_us(index, assign(placement), times)
        over = {name: us for name, us in {**bounds, "any_schedule": anything}.items() if us > found}
        assert not over, f"{over} exceed the {found} us of {placement}"


@settings(RANDOM, max_examples=300)
@given(regions(), costs(), st.data())
def test_no_bound_exceeds_a_simulated_placement(region, profile, data):
    no_bound_above_a_placement(region, profile, data, placements=3)


@pytest.mark.slow
@pytest.mark.timeout(3600)
@settings(RANDOM, max_examples=5_000)
@given(regions(), costs(), st.data())
def test_no_bound_exceeds_a_simulated_placement_in_50000(region, profile, data):
    no_bound_above_a_placement(region, profile, data, placements=10)


def below_every_schedule(workload, profile, actors, rewards):
    bound = any_schedule_us(workload, actors + rewards, StepCosts(workload, profile, "kind0"))
    for name in (n for n, schedule in SCHEDULES.items() if schedule.eligible):
        for scoring in SCORING:
            graph, assignment = build(
                workload, Placement(schedule=name, actors=actors, rewards=rewards, scoring=scoring)
            )
            times = Costs(graph, profile, Cluster.equal(actors + rewards, "kind0"), workload.trained_steps)
            found = step_us(GraphIndex(graph, profile), assignment, times)
            assert bound <= found, (name, scoring)


@settings(RANDOM, max_examples=120)
@given(workloads(), costs(), st.integers(1, 3), st.integers(1, 3))
def test_any_schedule_bound_is_below_every_schedule(workload, profile, actors, rewards):
    below_every_schedule(workload, profile, actors, rewards)


@pytest.mark.slow
@pytest.mark.timeout(3600)
@settings(RANDOM, max_examples=3_000)
@given(workloads(), costs(), st.integers(1, 3), st.integers(1, 3))
def test_any_schedule_bound_is_below_every_schedule_in_60000(workload, profile, actors, rewards):
    below_every_schedule(workload, profile, actors, rewards)


def bound_s(region, profile):
    return {name: us / 1e6 for name, us in region_bound(region, StepCosts(region.workload, profile, "gpu")).items()}


@pytest.mark.parametrize("scoring", SCORING)
def test_reward_chain_of_two_candidates_is_met_exactly(scoring):
    """One actor, one serial judge: rollout 10, reward 30 each, train 20 each. 10 + 2 x 30 = 70 and no less."""
    workload = workload_of()
    profile = profile_of(generate=10, t1=30, grad_replay=20)
    timeline, _ = simulated(workload, placement_of("merged_replay", scoring=scoring), profile)
    bounds = bound_s(Region(workload, 1, 1, scoring), profile)
    assert max(bounds.values()) == bounds["score_end"] == 70
    # a batch takes as long but starts when both videos are there
    assert timeline.makespan_us == {"on_arrival": 70, "per_mini_batch": 80, "one_batch": 80}[scoring] * 1_000_000


def test_each_bound_by_hand():
    workload = workload_of(candidates=8, group_size=4, mini_batches=2)
    profile = profile_of(
        "dynamic", t0=4, t1=2, encode_prompt=1, generate=10, vae_decode=3, grad_replay=20, fold=0.5, update=5
    )
    assert bound_s(Region(workload, 2, 1, "one_batch"), profile) == {
        "critical_path": 1 + 10 + 20 + 2 * 20 + 5 + 0.5 + 5,  # 4 candidates on 3 GPUs take 2 rounds
        "actor_rounds": 1 + 4 * 10 + 3 + 6 + 0.5 + 5,
        "score_end": 1 + 10 + 3 + (4 + 8 * 2) + 0.5 + 5,
        "work": pytest.approx((8 * 13 + 20 + 8 * 20.5 + 5) / 3 + 5, abs=1e-6),
        "mini_batch_chain": pytest.approx(1 + 10 + 80 / 3 + 0.5 + 5 + 2 * 20 + 5, abs=1e-6),
    }


@pytest.mark.parametrize(("serving", "scoring", "seconds"), [
    ("serial", "on_arrival", 12 * 11),
    ("serial", "one_batch", 10 + 12),
    ("dynamic", "on_arrival", 10 + 12),
    ("continuous", "on_arrival", 10 + 12),
])  # fmt: skip
def test_judge_works_at_its_best_batch_unless_it_is_serial(serving, scoring, seconds):
    workload = workload_of(candidates=12, group_size=12)
    profile = profile_of(serving, t0=10, t1=1)
    assert serving in SERVINGS
    assert bound_s(Region(workload, 1, 1, scoring), profile)["score_end"] == seconds


def test_pairs_go_to_judges_unevenly():
    """Pairs of two in a group all start with an even candidate: with two judges one gets them all."""
    workload = workload_of(candidates=6, group_size=2, reward_shape="all_pairs")
    c = StepCosts(workload, profile_of(), "gpu")
    assert c.dealt(1) == [["0-1", "2-3", "4-5"]]
    assert c.dealt(2) == [["0-1", "2-3", "4-5"], []]
    assert [len(names) for names in c.dealt(3)] == [1, 1, 1]
    profile = profile_of("dynamic", t0=12)  # a batch of any size takes 12 s
    assert bound_s(Region(workload, 1, 2, "one_batch"), profile)["work"] == 12 / 3
    timeline, _ = simulated(workload, placement_of("stagebreaker", 1, 2, scoring="one_batch"), profile)
    assert timeline.makespan_us == 12_000_000


def test_old_and_reference_replay_need_not_follow_each_other():
    """On two GPUs they run at the same time, so a bound for any schedule counts the longer one only."""
    workload = workload_of(old_logprob_source="recompute", reference_replay=True)
    profile = profile_of(old_replay=10, ref_replay=8)
    bound = any_schedule_us(workload, 4, StepCosts(workload, profile, "gpu"))
    apart = placement_of("stagebreaker", 2, 2, scoring="one_batch", ref_moved=(2,))
    timeline, _ = simulated(workload, apart, profile)
    assert bound == timeline.makespan_us == 10_000_000


def test_a_curve_that_is_not_measured_is_an_error_and_not_a_bound_of_zero():
    profile = profile_of()
    without = profile.model_copy(update={"tasks": tuple(t for t in profile.tasks if t.kind != "score")})
    with pytest.raises(ValueError, match="has no task 'score'"):
        region_bound(Region(workload_of(), 1, 1, "one_batch"), StepCosts(workload_of(), without, "gpu"))
