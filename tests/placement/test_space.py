"""The count space: what is listed is what the formula counts, each placement once."""

from dataclasses import replace
from math import prod

import pytest
from builders import profile_of, workload_of
from hypothesis import given, settings
from hypothesis import strategies as st

from stagebreaker.placement import search
from stagebreaker.placement.planner import make_plan
from stagebreaker.placement.space import Region, Space
from stagebreaker.profiles.document import InputError
from stagebreaker.sim.plan import SCORING, Placement
from stagebreaker.sim.workload import Cluster, load_workload

VRT = load_workload("dancegrpo-vrt", ("candidates=24", "group_size=12"))
KVPO = load_workload("kvpo-vrt", ("candidates=24", "group_size=12"))


@st.composite
def problems(draw):
    """(workload, number of GPUs, scoring modes): 2 to 8 candidates, mini-batches of unequal size too."""
    groups = draw(st.integers(1, 4))
    mini_batches = draw(st.integers(1, 3))
    workload = workload_of(
        candidates=2 * groups,
        mini_batches=min(mini_batches, 2 * groups),
        old_logprob_source=draw(st.sampled_from(("rollout", "first_replay", "recompute"))),
        reference_replay=draw(st.booleans()),
    )
    return workload, draw(st.integers(2, 4)), draw(st.sampled_from((*((s,) for s in SCORING), SCORING)))


def size_by_hand(workload, gpus, modes):
    """(N-1) splits x modes x (B+1) x prod(|mb|+1), and once more per mini-batch that has forward-only replays."""
    sizes = [len(workload.mini_batch_members(m)) for m in range(workload.mini_batches)]
    old = {"rollout": [], "first_replay": sizes[1:], "recompute": sizes}[workload.old_logprob_source]
    forward_only = sizes if workload.reference_replay else old
    each = (workload.candidates + 1) * prod(n + 1 for n in sizes) * prod(n + 1 for n in forward_only)
    return (gpus - 1) * len(modes) * each


@settings(deadline=None, max_examples=60)
@given(problems())
def test_listing_equals_the_formula_and_repeats_nothing(problem):
    workload, gpus, modes = problem
    space = Space.of(workload, gpus, None, modes)
    assert space.size == size_by_hand(workload, gpus, modes)
    for region in space.regions[:: max(1, len(space.regions) - 1)] if space.size > 20_000 else space.regions:
        if region.size <= 20_000:
            listed = list(region.placements())
            assert len(listed) == region.size
            assert len({p.model_dump_json() for p in listed}) == region.size
            assert len({p.key() for p in listed}) == region.size  # the tie-break is a total order


@settings(deadline=None, max_examples=40)
@given(problems(), st.data())
def test_every_listed_placement_is_valid_and_has_its_regions_split(problem, data):
    workload, gpus, modes = problem
    region = data.draw(st.sampled_from(Space.of(workload, gpus, None, modes).regions))
    for placement, _ in zip(region.placements(), range(500), strict=False):
        placement.check(workload)
        assert Placement.model_validate_json(placement.model_dump_json()) == placement
        assert (placement.actors, placement.rewards, placement.scoring) == (
            region.actors,
            region.rewards,
            region.scoring,
        )


def test_the_published_sizes():
    assert Space.of(VRT, 6, None, ("one_batch",)).size == 21_125
    assert sum(1 for region in Space.of(VRT, 6, None, ("one_batch",)).regions for _ in region.placements()) == 21_125
    assert Space.of(KVPO, 6, None, ("one_batch",)).size == 3_570_125
    assert Space.of(VRT, 6, None, SCORING).size == 3 * 21_125
    assert Space.of(VRT, 6, (4, 2), ("one_batch",)).size == 21_125 // 5


def test_mini_batches_of_unequal_size():
    workload = workload_of(candidates=10, group_size=5, mini_batches=3)  # 4, 3, 3
    assert Region(workload, 1, 1, "one_batch").size == 11 * 5 * 4 * 4
    recompute = workload.with_(old_logprob_source="recompute")
    assert Region(recompute, 1, 1, "one_batch").size == 11 * (5 * 4 * 4) ** 2
    first = workload.with_(old_logprob_source="first_replay")  # mini-batch 1 is its own old replay
    assert Region(first, 1, 1, "one_batch").size == 11 * (5 * 4 * 4) * (4 * 4)


@pytest.mark.parametrize("gpus", range(2, 9))
def test_n_gpus_have_n_minus_1_splits(gpus):
    """A planner whose loop ends one early never tries the last split."""
    regions = Space.of(workload_of(), gpus, None, ("one_batch",)).regions
    assert [(r.actors, r.rewards) for r in regions] == [(a, gpus - a) for a in range(1, gpus)]
    assert (gpus - 1, 1) in [(r.actors, r.rewards) for r in regions]


def test_old_and_reference_replay_of_a_candidate_move_together():
    region = Region(workload_of(old_logprob_source="recompute", reference_replay=True), 1, 1, "one_batch")
    assert {(p.old_moved, p.ref_moved) for p in region.placements()} == {((n,), (n,)) for n in range(3)}


def test_first_of_a_region_moves_nothing():
    region = Region(VRT, 4, 2, "one_batch")
    assert replace(region).base().key()[0] == 0
    assert next(region.placements()).key()[0] == 0


@pytest.mark.parametrize("gpus", [1, 0, -1])
def test_fewer_than_two_gpus_are_refused(gpus):
    with pytest.raises(InputError, match=rf"gpus={gpus} must be at least 2: one actor and one reward GPU"):
        Space.of(VRT, gpus, None, ("one_batch",))


def test_a_space_too_large_is_refused_before_anything_is_simulated(monkeypatch):
    def never(*_):
        raise AssertionError("simulated")

    monkeypatch.setattr(search, "step_us", never)
    monkeypatch.setattr("stagebreaker.placement.planner.simulate", never)
    space = Space.of(KVPO, 6, None, ("one_batch",))
    message = (
        "3570125 of the space's 3570125 placements would be simulated, the limit is 200000; narrow it with --actors"
    )
    with pytest.raises(InputError, match=message):
        search.search(KVPO, Cluster.equal(6, "gpu"), profile_of(), space, method="exhaustive")
    with pytest.raises(InputError, match=message):
        make_plan(KVPO, Cluster.equal(6, "gpu"), profile_of(), method="exhaustive")
