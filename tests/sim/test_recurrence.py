"""The recurrence against the engine on random graphs, and by hand where the answer is known."""

import pytest
from builders import placement_of, profile_of, simulated, workload_of
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from strategies import fixed_orders, scheduled

from stagebreaker.sim.dataflow import CONTROL_KINDS, Assignment, Lane, Need, StepGraph, Task
from stagebreaker.sim.dispatch import GraphIndex
from stagebreaker.sim.engine import Costs, DeadlockError, step_us
from stagebreaker.sim.recurrence import Recurrence, recurrence_times_us, recurrence_us
from stagebreaker.sim.schedules import build
from stagebreaker.sim.workload import Cluster

RANDOM = settings(deadline=None, suppress_health_check=list(HealthCheck))


def agree(case):
    """The engine's rows and step time are the recurrence's."""
    timeline = case.timeline()
    expected = recurrence_times_us(case.graph, case.assignment, case.costs())
    found = {row.task: (row.start_us, row.end_us) for row in timeline.rows if row.task in case.graph.by_id}
    assert found == {t: times for t, times in expected.items() if t in case.assignment.lane_of}
    assert timeline.makespan_us == recurrence_us(case.graph, case.assignment, case.costs())
    index = GraphIndex(case.graph, case.profile)
    assert step_us(index, case.assignment, case.costs()) == recurrence_us(index, case.assignment, case.costs())


def outcome(function, *arguments):
    try:
        return function(*arguments)
    except DeadlockError:
        return "deadlock"


@settings(RANDOM, max_examples=300)
@given(fixed_orders())
def test_engine_equals_recurrence(case):
    agree(case)


@pytest.mark.slow
@pytest.mark.timeout(3600)
@settings(RANDOM, max_examples=10_000)
@given(fixed_orders())
def test_engine_equals_recurrence_on_10000_graphs(case):
    agree(case)


@settings(RANDOM, max_examples=100)
@given(scheduled(scorings=("one_batch", "per_mini_batch")))
def test_engine_equals_recurrence_on_every_schedule(case):
    agree(case)


@settings(RANDOM, max_examples=100)
@given(fixed_orders(consistent=False))
def test_engine_and_recurrence_find_the_same_deadlocks(case):
    index, costs = GraphIndex(case.graph, case.profile), case.costs()
    assert outcome(step_us, index, case.assignment, costs) == outcome(recurrence_us, index, case.assignment, costs)


@settings(RANDOM, max_examples=100)
@given(fixed_orders(), st.data())
def test_creation_order_changes_nothing(case, data):
    other = case.created_in(data.draw(st.permutations(range(len(case.graph.tasks)))))
    expected = recurrence_times_us(case.graph, case.assignment, case.costs())
    assert recurrence_times_us(other.graph, other.assignment, other.costs()) == expected


# -- by hand -------------------------------------------------------------------------------------------------

LANES = (Lane("a", "actor", 0), Lane("b", "reward", 1))
PROFILE = profile_of(
    generate=10,
    vae_decode=3,
    grad_replay=20,
    update=1,
    sizes_bytes={"latents": 5 * 10**10, "adapter": 2 * 10**10},
)  # at 10 GB/s latents travel for 5 s, an adapter for 2 s


def by_hand(tasks, lane_of, order):
    graph = StepGraph(tuple(tasks), LANES)
    costs = Costs(graph, PROFILE, Cluster.equal(2, "gpu"), 3)
    return graph, Assignment(lane_of, order), costs


def two_decodes():
    tasks = [
        Task("generate:0", "generate"),
        Task("generate:1", "generate"),
        Task("vae_decode:0", "vae_decode", (Need("generate:0", "latents"),)),
        Task("vae_decode:1", "vae_decode", (Need("generate:1", "latents"),)),
    ]
    lane_of = {"generate:0": "a", "generate:1": "a", "vae_decode:0": "b", "vae_decode:1": "b"}
    return tasks, lane_of


def test_transfers_overlap_the_next_task():
    tasks, lane_of = two_decodes()
    graph, assignment, costs = by_hand(
        tasks, lane_of, {"a": ("generate:0", "generate:1"), "b": ("vae_decode:0", "vae_decode:1")}
    )
    s = 1_000_000
    assert recurrence_times_us(graph, assignment, costs) == {
        "generate:0": (0, 10 * s),
        "generate:1": (10 * s, 20 * s),
        "vae_decode:0": (15 * s, 18 * s),
        "vae_decode:1": (25 * s, 28 * s),
    }
    assert recurrence_us(graph, assignment, costs) == 28 * s


def test_queue_order_holds_even_where_the_second_could_start():
    tasks, lane_of = two_decodes()
    graph, assignment, costs = by_hand(
        tasks, lane_of, {"a": ("generate:0", "generate:1"), "b": ("vae_decode:1", "vae_decode:0")}
    )
    assert recurrence_us(graph, assignment, costs) == 31_000_000


def test_step_ends_with_the_last_adapter_not_with_the_update():
    tasks = [Task("update:0", "update"), Task("grad_replay:0", "grad_replay")]
    graph, assignment, costs = by_hand(
        [*tasks, Task("fold:0", "fold", (Need("grad_replay:0"),))],
        {"update:0": "a", "grad_replay:0": "b", "fold:0": "b"},
        {"a": ("update:0",), "b": ("grad_replay:0", "fold:0")},
    )
    assert recurrence_us(graph, assignment, costs) == 20_000_000
    without_policy = by_hand([Task("update:0", "update")], {"update:0": "a"}, {"a": ("update:0",), "b": ()})
    assert recurrence_us(*without_policy) == 1_000_000
    late = by_hand(
        [Task("update:0", "update", (Need("grad_replay:0"),)), tasks[1]],
        {"update:0": "a", "grad_replay:0": "b"},
        {"a": ("update:0",), "b": ("grad_replay:0",)},
    )
    assert recurrence_us(*late) == 23_000_000


def test_deadlock_names_waiting_tasks_and_only_missing_inputs():
    tasks = [
        Task("generate:0", "generate"),
        Task("vae_decode:0", "vae_decode", (Need("generate:0"), Need("grad_replay:1"))),
        Task("grad_replay:0", "grad_replay", (Need("vae_decode:0"),)),
        Task("grad_replay:1", "grad_replay"),
    ]
    lane_of = {"generate:0": "a", "vae_decode:0": "a", "grad_replay:0": "b", "grad_replay:1": "b"}
    order = {"a": ("generate:0", "vae_decode:0"), "b": ("grad_replay:0", "grad_replay:1")}
    with pytest.raises(DeadlockError) as error:
        recurrence_us(*by_hand(tasks, lane_of, order))
    assert str(error.value) == (
        "a waits for vae_decode:0, missing grad_replay:1; b waits for grad_replay:0, missing vae_decode:0"
    )


def test_requests_are_refused():
    workload, placement = workload_of(), placement_of("merged_replay", scoring="on_arrival")
    graph, assignment = build(workload, placement)
    costs = Costs(graph, profile_of(), Cluster.equal(2, "gpu"), 3)
    with pytest.raises(ValueError, match="2 tasks from request:0 on are requests"):
        recurrence_us(graph, assignment, costs)


def test_a_task_in_no_queue_or_in_two_is_refused():
    tasks, lane_of = two_decodes()
    forgotten = {"a": ("generate:0", "generate:1"), "b": ("vae_decode:0",)}
    with pytest.raises(ValueError, match="vae_decode:1 is in no queue"):
        recurrence_us(*by_hand(tasks, lane_of, forgotten))
    twice = {"a": ("generate:0", "generate:1", "vae_decode:1"), "b": ("vae_decode:0", "vae_decode:1")}
    with pytest.raises(ValueError, match="vae_decode:1 is queued twice"):
        recurrence_us(*by_hand(tasks, lane_of, twice))


def test_one_object_serves_many_assignments():
    workload = workload_of(candidates=4, group_size=4)
    profile = profile_of(generate=10, t0=5, t1=1, grad_replay=20)
    placements = [placement_of("stagebreaker", scoring="one_batch", train_moved=(count,)) for count in range(5)]
    graph, _ = build(workload, placements[0])
    recurrence = Recurrence(graph, Costs(graph, profile, Cluster.equal(2, "gpu"), 3))
    found = [recurrence.step_us(build(workload, p)[1]) for p in placements]
    assert found == [simulated(workload, p, profile)[0].makespan_us for p in placements]
    # four rollouts, then n of four replays on the actor, the others behind a batch that takes 9 s
    assert found == [1_000_000 * max(40 + 20 * (4 - n), 49 + 20 * n) for n in range(5)]


def test_control_tasks_take_no_time():
    assert CONTROL_KINDS == ("advantage", "barrier", "group_weights")
    workload, placement = workload_of(), placement_of("async_reward_merged", scoring="one_batch")
    graph, assignment = build(workload, placement)
    times = recurrence_times_us(graph, assignment, Costs(graph, PROFILE, Cluster.equal(2, "gpu"), 3))
    for task in graph.tasks:
        if task.kind in CONTROL_KINDS:
            assert times[task.id][0] == times[task.id][1] == max(times[n.task][1] for n in task.needs)
