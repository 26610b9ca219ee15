"""What the engine predicts, on steps small enough to work out by hand, and what holds for any step."""

from dataclasses import replace
from fractions import Fraction
from itertools import pairwise

import pytest
from builders import SECOND, placement_of, profile_of, simulated, span_s, step_s, workload_of
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from strategies import fixed_orders, scheduled

from stagebreaker.profiles.document import InputError
from stagebreaker.profiles.table import GpuKind, LinkCost, Profile, TaskCost
from stagebreaker.sim.dataflow import REQUEST, Assignment, Lane, Need, StepGraph, Task
from stagebreaker.sim.dispatch import GraphIndex
from stagebreaker.sim.engine import Costs, DeadlockError, simulate, step_us
from stagebreaker.sim.schedules import build
from stagebreaker.sim.workload import Cluster, Gpu

RANDOM = settings(deadline=None, suppress_health_check=list(HealthCheck), max_examples=100)


# -- two candidates, one actor, one reward GPU: rollout 10 s, score 30 s, train 20 s --

TWO = profile_of(generate=10, t0=30, grad_replay=20, loss_replay=5, old_replay=4)


def two(schedule, profile=TWO, old="rollout", **placement):
    workload = workload_of(old_logprob_source=old)
    return simulated(workload, placement_of(schedule, **{"scoring": "on_arrival"} | placement), profile)


def idle_s(timeline, graph, lane):
    (use,) = [use for use in timeline.use(graph) if use.lane.name == lane]
    return {cause: us / SECOND for cause, us in use.idle_us.items() if us}, use.busy_us / SECOND


def test_training_after_the_last_score_leaves_the_actor_idle_for_50_s():
    timeline, graph = two("async_reward_merged")
    assert timeline.makespan_us == 110 * SECOND
    assert idle_s(timeline, graph, "actor0") == ({"wait:reward": 50}, 60)
    assert idle_s(timeline, graph, "reward0") == ({"wait:latents": 10, "tail": 40}, 60)
    assert [span_s(timeline, f"grad_replay:{i}") for i in range(2)] == [(70, 90), (90, 110)]


def test_training_at_once_hides_the_scores():
    timeline, graph = two("merged_replay")
    assert timeline.makespan_us == 70 * SECOND
    assert idle_s(timeline, graph, "actor0") == ({"wait:reward": 10}, 60)
    assert timeline.utilisation("actor", graph) == pytest.approx(6 / 7)
    assert timeline.utilisation("reward", graph) == pytest.approx(6 / 7)
    assert span_s(timeline, "fold:1") == span_s(timeline, "update:0") == (70, 70)


@pytest.mark.parametrize(
    ("schedule", "old", "seconds"),
    [
        ("async_reward", "rollout", 70 + 2 * 5 + 2 * 20),
        ("async_reward", "recompute", 70 + 2 * 4 + 2 * 5 + 2 * 20),
        ("async_train", "rollout", 20 + 2 * 5 + 2 * 20),
        ("async_train", "recompute", 20 + 2 * 4 + 2 * 5 + 2 * 20),
        ("merged_replay", "recompute", 70),
        ("async_reward_merged", "recompute", 110),
        ("colocated", "rollout", 10 + 30 + 5 + 20),
        ("colocated", "recompute", 10 + 30 + 4 + 5 + 20),
        ("colocated_merged", "rollout", 10 + 30 + 20),
    ],
)
def test_step_of_every_schedule(schedule, old, seconds):
    assert two(schedule, old=old)[0].makespan_us == seconds * SECOND


def test_colocated_pays_both_switches():
    profile = profile_of(generate=10, t0=30, grad_replay=20, loss_replay=5, switch=3)
    timeline, graph = two("colocated", profile)
    assert timeline.makespan_us == (10 + 3 + 30 + 3 + 5 + 20) * SECOND
    assert [use.overhead_us for use in timeline.use(graph)] == [6 * SECOND] * 2
    assert [use.busy_us for use in timeline.use(graph)] == [65 * SECOND] * 2


def test_moved_training_runs_on_the_reward_gpu_behind_its_batch():
    profile = profile_of(generate=10, t0=28, t1=1, grad_replay=20)
    timeline, _ = two("stagebreaker", profile, scoring="one_batch", train_moved=(1,))
    assert span_s(timeline, "score:reward0#0") == (20, 50)
    assert span_s(timeline, "grad_replay:1") == (50, 70)
    assert span_s(timeline, "grad_replay:0") == (20, 40)
    assert timeline.makespan_us == 70 * SECOND


def test_moved_decodes_run_on_the_reward_gpu():
    profile = profile_of(generate=10, vae_decode=4, t0=28, t1=1, grad_replay=20)
    stay, _ = two("stagebreaker", profile, scoring="one_batch")
    move, _ = two("stagebreaker", profile, scoring="one_batch", vae_moved=2)
    assert span_s(stay, "score:reward0#0") == (28, 58)
    assert span_s(move, "vae_decode:0") == (10, 14)
    assert span_s(move, "score:reward0#0") == (24, 54)
    assert (stay.makespan_us, move.makespan_us) == (68 * SECOND, 60 * SECOND)


def test_second_mini_batch_waits_for_the_update():
    profile = profile_of(generate=10, t0=30, grad_replay=20, update=3)
    timeline, graph = simulated(
        workload_of(mini_batches=2), placement_of("merged_replay", scoring="on_arrival"), profile
    )
    assert span_s(timeline, "update:0") == (70, 73)
    assert span_s(timeline, "grad_replay:1") == (73, 93)
    assert timeline.makespan_us == 96 * SECOND
    assert idle_s(timeline, graph, "actor0")[0] == {"wait:reward": 30}


def test_waiting_for_the_scores_lengthens_the_step_where_old_replays_fill_the_wait():
    workload, placement = (
        workload_of(old_logprob_source="recompute"),
        placement_of("async_reward_merged", scoring="on_arrival"),
    )
    graph, assignment = build(workload, placement)

    def step_s_of(graph):
        return simulate(graph, assignment, TWO, Cluster.equal(2, "gpu"), 3).makespan_us / SECOND

    tied = [replace(t, needs=(*t.needs, Need("barrier:scored"))) if t.kind == "old_replay" else t for t in graph.tasks]
    assert step_s_of(graph) == 110
    assert step_s_of(StepGraph(tuple(tied), graph.lanes)) == 118


@pytest.mark.parametrize("score_s", [0, 0.1, 1, 10, 60])
def test_what_overlap_gains_is_nothing_for_a_free_judge(score_s):
    profile = profile_of(generate=10, t0=score_s, grad_replay=20)
    late, _ = two("async_reward_merged", profile)
    early, _ = two("merged_replay", profile)
    last_score = max(20 + score_s, 10 + 2 * score_s)
    assert late.makespan_us == (last_score + 40) * SECOND
    assert early.makespan_us == max(last_score, 60) * SECOND
    assert (late.makespan_us == early.makespan_us) == (score_s == 0)


# -- the judge: 12 videos, one every 5 s from 5 s on; t(b) = 10 + b s --

TWELVE = workload_of(candidates=12, group_size=12)


def scored(serving, scoring="on_arrival"):
    profile = profile_of(serving, t0=10, t1=1, generate=5)
    timeline, _ = simulated(TWELVE, placement_of("merged_replay", scoring=scoring), profile)
    return timeline, [row for row in timeline.rows if row.kind == "score"]


def test_serial_judge_ends_at_137_s():
    timeline, batches = scored("serial")
    assert [row.end_us for row in batches] == [(5 + 11 * (n + 1)) * SECOND for n in range(12)]
    assert [row.members for row in batches] == [str(n) for n in range(12)]
    assert timeline.makespan_us == 137 * SECOND


def test_dynamic_judge_ends_at_77_s():
    _, batches = scored("dynamic")
    assert [len(row.members.split()) for row in batches] == [1, 2, 2, 3, 2, 2]
    assert [row.end_us / SECOND for row in batches] == [16, 28, 40, 53, 65, 77]


def test_continuous_judge_ends_at_71_8_s():
    timeline, (batch,) = scored("continuous")
    clock, left, ends = Fraction(0), {}, {}
    arrivals = [(Fraction(5 * (n + 1)), n) for n in range(12)]
    while arrivals or left:
        t = 10 + len(left)
        done = clock + min(left.values()) * t if left else None
        if arrivals and (done is None or arrivals[0][0] <= done):
            now, joined = arrivals.pop(0)
        else:
            now, joined = done, None
        left = {n: share - (now - clock) / t for n, share in left.items()}
        clock = now
        ends |= {n: now for n, share in left.items() if share == 0}
        left = {n: share for n, share in left.items() if share} | ({joined: Fraction(1)} if joined is not None else {})
    found = {
        row.candidate if row.candidate is not None else int(row.members): row.end_us
        for row in timeline.rows
        if row.kind == REQUEST
    }
    assert found.keys() == ends.keys()
    for n, end in ends.items():
        assert found[n] == pytest.approx(float(end * SECOND), abs=20)
    assert round(batch.end_us / SECOND, 1) == 71.8
    assert batch.start_us == 5 * SECOND
    assert batch.members.split() == [str(n) for n in range(12)]


def test_one_batch_after_the_last_video_ends_at_82_s():
    for serving in ("serial", "dynamic", "continuous"):
        _, (batch,) = scored(serving, "one_batch")
        assert (batch.start_us, batch.end_us) == (60 * SECOND, 82 * SECOND)


def test_continuous_requests_pause_while_their_gpu_decodes():
    profile = profile_of("continuous", generate=10, vae_decode=4, t0=20)
    workload = workload_of(candidates=2)
    timeline, _ = simulated(workload, placement_of("stagebreaker", scoring="on_arrival", vae_moved=2), profile)
    assert [span_s(timeline, f"vae_decode:{i}") for i in range(2)] == [(10, 14), (20, 24)]
    request = {row.task: row for row in timeline.rows if row.kind == REQUEST}
    # 6 s of 20 before the second decode, the rest after it: t(1) = t(2) here
    assert request["request:0"].end_us == pytest.approx(38 * SECOND, abs=5)
    assert request["request:1"].end_us == pytest.approx(44 * SECOND, abs=5)


def test_a_video_that_arrives_as_a_batch_ends_joins_the_next_batch():
    profile = profile_of("dynamic", generate=11, t0=10, t1=1)
    timeline, _ = simulated(
        workload_of(candidates=4, group_size=4), placement_of("merged_replay", scoring="on_arrival"), profile
    )
    batches = [row for row in timeline.rows if row.kind == "score"]
    assert [(row.start_us / SECOND, row.end_us / SECOND) for row in batches] == [
        (11, 22),
        (22, 33),
        (33, 44),
        (44, 55),
    ]


def test_last_video_releases_its_pairs_with_all_others():
    profile = profile_of("dynamic", generate=10, t0=1)
    workload = workload_of(candidates=4, group_size=4, reward_shape="all_pairs")
    timeline, _ = simulated(workload, placement_of("merged_replay", scoring="on_arrival"), profile)
    ready = {row.task: row.ready_us / SECOND for row in timeline.rows if row.kind == REQUEST}
    assert ready == {
        "request:0-1": 20,
        "request:0-2": 30,
        "request:1-2": 30,
        "request:0-3": 40,
        "request:1-3": 40,
        "request:2-3": 40,
    }


def two_lanes():
    return Lane("a", "actor", 0), Lane("b", "reward", 1)


# -- transfers --


def broadcast():
    """An update on one GPU and a policy on five more."""
    lanes = tuple(Lane(f"gpu{n}", "all", n) for n in range(6))
    replays = [Task(f"generate:{n}", "generate") for n in range(1, 6)]
    lane_of = {"update:0": "gpu0"} | {f"generate:{n}": f"gpu{n}" for n in range(1, 6)}
    order = {lane.name: tuple(t for t, name in lane_of.items() if name == lane.name) for lane in lanes}
    return StepGraph((Task("update:0", "update"), *replays), lanes), Assignment(lane_of, order)


def test_a_sender_serves_its_receivers_one_by_one():
    profile = profile_of(sizes_bytes={"adapter": 350_000_000})
    timeline = simulate(*broadcast(), profile, Cluster.equal(6, "gpu"), 3)
    syncs = [row for row in timeline.rows if row.kind == "sync"]
    assert [(row.start_us, row.end_us) for row in syncs] == [(35_000 * n, 35_000 * (n + 1)) for n in range(5)]
    assert [row.task for row in syncs] == [f"sync:update:0/adapter>gpu{n}" for n in range(1, 6)]
    assert {row.gpu for row in syncs} == {"link:gpu0"}
    assert timeline.makespan_us == 175_000


def test_every_transfer_pays_the_latency():
    profile = profile_of(link=LinkCost(latency_us=20, bytes_per_s=10_000_000_000), sizes_bytes={"adapter": 350_000_000})
    assert simulate(*broadcast(), profile, Cluster.equal(6, "gpu"), 3).makespan_us == 5 * 35_020


def test_data_travels_once_to_a_lane_however_many_tasks_there_need_it():
    lanes = two_lanes()
    tasks = [
        Task("generate:0", "generate"),
        Task("old_replay:0", "old_replay", (Need("generate:0", "trajectory"),)),
        Task("grad_replay:0", "grad_replay", (Need("generate:0", "trajectory"),)),
    ]
    lane_of = {"generate:0": "a", "old_replay:0": "b", "grad_replay:0": "b"}
    assignment = Assignment(lane_of, {"a": ("generate:0",), "b": ("old_replay:0", "grad_replay:0")})
    profile = profile_of(sizes_bytes={"trajectory": 10_000_000_000})
    timeline = simulate(StepGraph(tuple(tasks), lanes), assignment, profile, Cluster.equal(2, "gpu"), 3)
    assert [row.task for row in timeline.rows if row.kind == "transfer"] == ["transfer:generate:0/trajectory>b"]
    assert timeline.makespan_us == SECOND


# -- split replays --


def test_part_costs_the_context_rebuild_and_its_share_of_the_rest():
    graph = StepGraph((Task("generate:0", "generate"),), (Lane("a", "actor", 0),))
    costs = Costs(graph, profile_of(grad_replay=16, context_rebuild=1), Cluster.equal(1, "gpu"), 3)

    def part_s(steps):
        return costs.task_us(Task("grad_replay:0", "grad_replay", steps=steps), 0) / SECOND

    assert part_s(None) == part_s((0, 1, 2)) == 16
    assert part_s((0, 1)) == 1 + 10
    assert part_s((2,)) == 1 + 5


def test_a_task_costs_what_its_lane_s_gpu_takes():
    kinds = tuple(GpuKind(name=name, model="none") for name in ("fast", "slow"))
    tasks = [TaskCost(kind="generate", gpu_kind=k, samples_us=(us,)) for k, us in (("fast", 3), ("slow", 7))]
    profile = TWO.model_copy(update={"gpu_kinds": kinds, "tasks": tuple(tasks)})
    graph = StepGraph(tuple(Task(f"generate:{i}", "generate") for i in range(2)), two_lanes())
    assignment = Assignment({"generate:0": "a", "generate:1": "b"}, {"a": ("generate:0",), "b": ("generate:1",)})
    cluster = Cluster(gpus=(Gpu(name="g0", kind="slow"), Gpu(name="g1", kind="fast")))
    ends = {row.task: row.end_us for row in simulate(graph, assignment, profile, cluster, 3).rows}
    assert ends == {"generate:0": 7, "generate:1": 3}


@pytest.mark.parametrize("serving", ["serial", "dynamic", "continuous"])
def test_requests_of_one_instant_are_served_in_candidate_order(serving):
    tasks = [Task(f"request:{i}", REQUEST, members=(str(i),), candidate=i) for i in (2, 10, 0, 1)]
    graph = StepGraph(tuple(tasks), two_lanes())
    assignment = Assignment({task.id: "b" for task in tasks}, {"a": (), "b": ()})
    profile = profile_of(serving, t0=10, t1=1)
    timeline = simulate(graph, assignment, profile, Cluster.equal(2, "gpu"), 3)
    batches = [row.members for row in timeline.rows if row.kind == "score"]
    assert batches == (["0", "1", "2", "10"] if serving == "serial" else ["0 1 2 10"])


# -- refusals --


def test_deadlock_names_waiting_tasks_and_their_missing_inputs():
    lanes = two_lanes()
    tasks = [
        Task("generate:0", "generate"),
        Task("vae_decode:0", "vae_decode", (Need("generate:0"), Need("grad_replay:1"))),
        Task("grad_replay:0", "grad_replay", (Need("vae_decode:0"),)),
        Task("grad_replay:1", "grad_replay"),
    ]
    lane_of = {"generate:0": "a", "vae_decode:0": "a", "grad_replay:0": "b", "grad_replay:1": "b"}
    order = {"a": ("generate:0", "vae_decode:0"), "b": ("grad_replay:0", "grad_replay:1")}
    with pytest.raises(DeadlockError) as error:
        simulate(
            StepGraph(tuple(tasks), lanes),
            Assignment(lane_of, order),
            profile_of(),
            Cluster.equal(2, "gpu"),
            3,
        )
    of_a, of_b = str(error.value).split("; ")
    assert "a waits for vae_decode:0" in of_a
    assert "grad_replay:1" in of_a
    assert "generate:0" not in of_a, "this input has arrived"
    assert "b waits for grad_replay:0" in of_b
    assert "vae_decode:0" in of_b


def test_a_task_in_no_queue_is_not_skipped_in_silence():
    lanes = (Lane("a", "actor", 0),)
    graph = StepGraph((Task("generate:0", "generate"), Task("generate:1", "generate")), lanes)
    assignment = Assignment({"generate:0": "a"}, {"a": ("generate:0",)})
    with pytest.raises((ValueError, DeadlockError), match="generate:1"):
        simulate(graph, assignment, profile_of(), Cluster.equal(1, "gpu"), 3)


def without(profile, kind):
    return profile.model_copy(update={"tasks": tuple(t for t in profile.tasks if t.kind != kind)})


@pytest.mark.parametrize("kind", ["encode_prompt", "generate", "vae_decode", "score", "grad_replay", "fold", "update"])
def test_profile_without_a_needed_task_is_refused_by_name(kind):
    with pytest.raises(InputError, match=f"no task '{kind}' on GPU kind 'gpu'"):
        two("merged_replay", without(TWO, kind))


def test_profile_without_a_task_that_is_not_needed_will_do():
    assert two("merged_replay", without(TWO, "old_replay"))[0].makespan_us == 70 * SECOND


def test_profile_without_a_size_is_refused_by_name():
    sizes = {kind: size for kind, size in TWO.sizes_bytes.items() if kind != "frames"}
    with pytest.raises(InputError, match=r"no sizes_bytes\.frames"):
        two("merged_replay", TWO.model_copy(update={"sizes_bytes": sizes}))


def test_batch_outside_the_measured_range_is_refused():
    measured = TaskCost(kind="score", gpu_kind="gpu", batch_size=4, samples_us=(7,))
    profile = without(TWO, "score")
    profile = Profile.model_validate(profile.model_copy(update={"tasks": (*profile.tasks, measured)}))
    with pytest.raises(InputError, match=r"batch size 2 of score on gpu .* is outside the measured 4\.\.4"):
        two("merged_replay", profile, scoring="one_batch")


def test_too_few_gpus_are_counted():
    graph, assignment = build(workload_of(), placement_of("merged_replay", actors=4, rewards=2))
    with pytest.raises(InputError, match="needs 6 GPUs, the cluster has 4: missing 2"):
        simulate(graph, assignment, TWO, Cluster.equal(4, "gpu"), 3)


# -- what holds for any step --


def check(case):
    timeline = case.timeline()
    rows = {row.task: row for row in timeline.rows}
    assert len(rows) == len(timeline.rows)
    for lane in timeline.lanes:
        for earlier, later in pairwise(timeline.spans(lane.name)):
            assert earlier.end_us <= later.start_us
    for task in case.graph.tasks:
        if task.id not in rows and task.kind not in ("advantage", "barrier", "group_weights"):
            pytest.fail(f"{task.id} has no row")
        for need in task.needs:
            if task.id in rows and need.task in rows:
                assert rows[need.task].end_us <= rows[task.id].ready_us <= rows[task.id].start_us
    for use in timeline.use(case.graph):
        assert use.busy_us + use.overhead_us + sum(use.idle_us.values()) == timeline.makespan_us
        assert min(use.idle_us.values()) >= 0
    return timeline


@RANDOM
@given(scheduled())
def test_lanes_are_exclusive_inputs_come_first_and_time_adds_up(case):
    timeline = check(case)
    index = GraphIndex(case.graph, case.profile)
    assert step_us(index, case.assignment, case.costs()) == timeline.makespan_us
    served = [row.members for row in timeline.rows if row.kind == REQUEST]
    assert len(served) == len(case.graph.of_kind(REQUEST))


@RANDOM
@given(fixed_orders())
def test_time_adds_up_on_any_graph(case):
    check(case)


def assert_same_rows(one, other):
    assert set(one.rows) == set(other.rows)
    assert len(one.rows) == len(other.rows)


@RANDOM
@given(fixed_orders(), st.data())
def test_creation_order_changes_no_row(case, data):
    other = case.created_in(data.draw(st.permutations(range(len(case.graph.tasks)))))
    assert_same_rows(other.timeline(), case.timeline())


@pytest.mark.parametrize("serving", ["serial", "dynamic", "continuous"])
@settings(RANDOM, max_examples=40)
@given(data=st.data())
def test_creation_order_changes_no_row_of_a_schedule(serving, data):
    case = data.draw(scheduled(servings=(serving,)))
    other = case.created_in(data.draw(st.permutations(range(len(case.graph.tasks)))))
    assert_same_rows(other.timeline(), case.timeline())


@RANDOM
@given(scheduled())
def test_same_input_same_rows(case):
    assert case.timeline().rows == case.timeline().rows


def test_rows_make_a_table():
    timeline, _ = two("merged_replay")
    frame = timeline.frame()
    assert list(frame.columns) == [
        "task",
        "kind",
        "candidate",
        "steps",
        "chunks",
        "members",
        "mini_batch",
        "gpu",
        "role",
        "ready_us",
        "start_us",
        "end_us",
    ]
    assert frame.end_us.max() == 70 * SECOND
    assert frame.loc[frame.task == "grad_replay:1", ["candidate", "mini_batch"]].values.tolist() == [[1, 0]]
    assert step_s(workload_of(), placement_of("merged_replay", scoring="on_arrival"), TWO) == 70
