"""The search finds what an independent loop over all counts finds, by other code; ties and bytes are fixed."""

from itertools import product

import pytest
from builders import placement_of, profile_of, simulated, workload_of
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from strategies import profiles

from stagebreaker.placement.search import LIMIT, search
from stagebreaker.placement.space import Space
from stagebreaker.profiles.table import TaskCost
from stagebreaker.sim.engine import Costs
from stagebreaker.sim.plan import SCORING, Placement
from stagebreaker.sim.recurrence import recurrence_us
from stagebreaker.sim.schedules import build
from stagebreaker.sim.workload import Cluster

RANDOM = settings(deadline=None, suppress_health_check=list(HealthCheck))
GATHERED = ("one_batch", "per_mini_batch")


def brute_force(workload, profile, gpus, modes):
    """{(actors, rewards, scoring): [(step time, placement), ...]}, each by the recurrence on a graph of its own."""
    found = {}
    sizes = [len(workload.mini_batch_members(m)) for m in range(workload.mini_batches)]
    cluster = Cluster.equal(gpus, profile.gpu_kinds[0].name)
    for actors, mode in product(range(1, gpus), modes):
        region = found[actors, gpus - actors, mode] = []
        for vae, *train in product(range(workload.candidates + 1), *(range(n + 1) for n in sizes)):
            placement = Placement(
                schedule="stagebreaker",
                actors=actors,
                rewards=gpus - actors,
                scoring=mode,
                vae_moved=vae,
                train_moved=tuple(train),
            )
            graph, assignment = build(workload, placement)
            costs = Costs(graph, profile, cluster, workload.trained_steps)
            region.append((recurrence_us(graph, assignment, costs), placement))
    return found


@st.composite
def small_workloads(draw):
    """2 or 4 candidates without forward-only replays: at most 45 placements a region."""
    groups = draw(st.integers(1, 2))
    return workload_of(
        candidates=2 * groups,
        mini_batches=draw(st.integers(1, 2)),
        advantage_scope=draw(st.sampled_from(("group", "batch"))),
        deterministic=draw(st.booleans()),
    )


@settings(RANDOM, max_examples=15)
@given(small_workloads(), profiles(), st.integers(2, 3))
def test_search_equals_brute_force_with_the_recurrence(workload, profile, gpus):
    expected = brute_force(workload, profile, gpus, GATHERED)
    space = Space.of(workload, gpus, None, GATHERED)
    result = search(workload, Cluster.equal(gpus, "kind0"), profile, space)
    assert [(r.region.actors, r.region.rewards, r.region.scoring) for r in result.regions] == list(expected)
    for region, listed in zip(result.regions, expected.values(), strict=True):
        first, second, *_ = sorted(((us, p.key()), p) for us, p in listed)
        assert (region.step_us, region.best) == (first[0][0], first[1])
        assert region.runner_up == (second[0][0], second[1])
        assert region.simulated == region.region.size == len(listed)
    assert result.simulated == space.size
    best = min((us, p.key()) for listed in expected.values() for us, p in listed)
    assert (result.best.step_us, result.best.best.key()) == best
    assert result.lower_bound_us <= result.best.step_us


def found_for(workload, profile, gpus=2, modes=("one_batch",), split=None):
    space = Space.of(workload, gpus, split, modes)
    return search(workload, Cluster.equal(gpus, profile.gpu_kinds[0].name), profile, space)


def test_where_nothing_costs_anything_nothing_is_moved():
    """All placements tie: fewest moves, then fewest reward GPUs, then the scoring mode's place, then small counts."""
    best = found_for(workload_of(candidates=4), profile_of(), 4, SCORING[::-1]).best.best
    assert best == placement_of("stagebreaker", 3, 1, scoring=SCORING[0], train_moved=(0,))


def test_ties_do_not_depend_on_the_order_of_regions():
    workload, profile = workload_of(candidates=4), profile_of(generate=1)
    for split in ((1, 2), (2, 1)):
        modes = [found_for(workload, profile, 3, order, split).best.best for order in (SCORING, SCORING[::-1])]
        assert modes[0] == modes[1]


def test_optimum_by_hand():
    """One actor, one judge, six candidates: 10 each to roll out, 20 to train, one batch of scores takes 25.

    The actor rolls out until 60, the judge then scores until 85. Moving n replays: max(60 + 20 (6-n), 85 + 20 n).
    """
    result = found_for(
        workload_of(candidates=6, group_size=6), profile_of(generate=10, t0=25, grad_replay=20), split=(1, 1)
    )
    assert [max(60 + 20 * (6 - n), 85 + 20 * n) for n in range(4)] == [180, 160, 140, 145]
    assert result.best.step_us == 140_000_000
    assert result.best.best.train_moved == (2,)
    assert result.best.best.vae_moved == 0  # decodes cost nothing, so none is moved


def test_costs_are_the_tables_and_not_scaled_from_one_entry():
    """Sub-linear: one video takes 100 to score, two 120, four 180. Linear scaling would split the judges."""
    profile = profile_of("dynamic", generate=10)
    curve = [
        TaskCost(kind="score", gpu_kind="gpu", batch_size=b, samples_us=(us * 1_000_000,))
        for b, us in ((1, 100), (2, 120), (4, 180))
    ]
    profile = profile.model_copy(update={"tasks": (*(t for t in profile.tasks if t.kind != "score"), *curve)})
    result = found_for(workload_of(candidates=4, group_size=4), profile, 3)
    steps = {r.region.actors: r.step_us / 1_000_000 for r in result.regions}
    # two judges of two: four rollouts of 10 on one actor, then 120; one judge of four: two rollouts, then 180
    assert steps == {1: 40 + 120, 2: 20 + 180}
    assert result.best.region.actors == 1


def test_step_time_of_the_best_is_what_a_recorded_simulation_takes():
    workload = workload_of(candidates=6, group_size=3, mini_batches=2, reward_shape="all_pairs")
    profile = profile_of("continuous", t0=2, t1=1, generate=3, vae_decode=2, grad_replay=5, update=1)
    for mode in SCORING:
        best = found_for(workload, profile, 3, (mode,)).best
        assert simulated(workload, best.best, profile)[0].makespan_us == best.step_us


def test_progress_counts_every_placement():
    ticks = []
    workload, profile = workload_of(candidates=12, group_size=6, mini_batches=2), profile_of(generate=1)

    class Bar:
        def __enter__(self):
            return ticks.append

        def __exit__(self, *_):
            ticks.append("closed")

    opened = []
    space = Space.of(workload, 2, None, ("one_batch",))
    search(workload, Cluster.equal(2, "gpu"), profile, space, lambda *a: opened.append(a) or Bar())
    assert opened == [("searching placements", 637)]
    assert ticks.pop() == "closed"
    assert sum(ticks) == space.size == 637


def test_an_interrupt_is_not_taken_for_a_bad_placement(monkeypatch):
    """No placement is skipped because evaluating it failed."""

    def broken(*_):
        raise ZeroDivisionError

    monkeypatch.setattr("stagebreaker.placement.search.step_us", broken)
    with pytest.raises(ZeroDivisionError):
        found_for(workload_of(), profile_of())


def test_limit_is_the_documented_one():
    assert LIMIT == 200_000
