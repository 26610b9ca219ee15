"""The controller on a scripted backend with a clock of its own: what starts when, and the simulator's timeline.

The backend takes exactly the profiled time for everything, so a measured step must be the predicted one.
"""

import heapq
import itertools
import math

import pytest
from builders import profile_of
from runs import place, small

from stagebreaker.executor import controller
from stagebreaker.executor.backends import Done, TaskFailedError
from stagebreaker.executor.controller import run_step
from stagebreaker.profiles.table import LinkCost
from stagebreaker.sim.dataflow import Assignment
from stagebreaker.sim.dispatch import GraphIndex
from stagebreaker.sim.engine import Costs, DeadlockError, simulate
from stagebreaker.sim.schedules import SCHEDULES, build
from stagebreaker.sim.workload import Cluster

SIZES = {"latents": 31, "trajectory": 53, "gradient": 71, "adapter": 11, "frames": 130, "embeddings": 7}
TIMES = {
    "encode_prompt": 0.011,
    "generate": 1.013,
    "vae_decode": 0.517,
    "loss_replay": 0.419,
    "old_replay": 0.433,
    "grad_replay": 1.709,
    "fold": 0.023,
    "update": 0.307,
    "switch": 0.201,
    "context_rebuild": 0.101,
}


class Scripted:
    """Everything takes its profiled time; refuses what a GPU or a link could not do.

    A lane does one task at a time and may hold one more that was sent ahead.
    """

    name = "scripted"

    def __init__(self, graph, profile, cluster, trained_steps):
        self.costs = Costs(graph, profile, cluster, trained_steps)
        self.graph, self.clock, self.count = graph, 1_000_000, itertools.count()
        self.events, self.log = [], []
        self.exclusive, self.ahead, self.sending = {}, {}, set()
        self.active = [{} for _ in graph.lanes]
        self.fails = None

    def run(self, lane, task, token):
        if lane in self.exclusive:
            assert lane not in self.ahead, f"{task.id} is sent behind {self.exclusive[lane]} and {self.ahead[lane]}"
            assert task.kind != "request", f"{task.id} is sent while {self.exclusive[lane]} runs"
            self.ahead[lane] = (task, token)
            return
        self.log.append((self.clock, self.graph.lanes[lane].name, task.id))
        if task.kind == "request":
            self.active[lane][task.id] = [1.0, token, self.clock]
            return
        self.exclusive[lane] = task.id
        self._later(self.costs.task_us(task, lane), "task", lane, task.id, token)

    def send(self, source, target, task, data, size_bytes, token):
        assert source not in self.sending, f"{task}/{data} leaves while another does"
        assert source != target
        self.sending.add(source)
        self._later(self.costs.link.duration_us(size_bytes), "link", source, f"{task}/{data}", token)

    def _later(self, delay_us, what, lane, name, token):
        heapq.heappush(self.events, (self.clock + delay_us, next(self.count), what, lane, name, token, self.clock))

    def wait(self):
        soon = [self.events[0][0]] if self.events else []
        for lane, requests in enumerate(self.active):
            if requests and lane not in self.exclusive:
                least = min(left for left, _, _ in requests.values())
                soon.append(self.clock + math.ceil(least * self.costs.batch_us(list(requests), lane) - 1e-6))
        self._advance(min(soon) - self.clock)
        done = []
        while self.events and self.events[0][0] == self.clock:
            _, _, what, lane, name, token, start = heapq.heappop(self.events)
            if name == self.fails:
                raise TaskFailedError(f"task {name} on {self.graph.lanes[lane].name} failed: RuntimeError: broken")
            done.append(Done(token, f"value of {name}", start, self.clock))
            if what == "link":
                self.sending.discard(lane)
                continue
            self.exclusive.pop(lane)
            if lane in self.ahead:
                self.run(lane, *self.ahead.pop(lane))
        for requests in self.active:
            for name in [name for name, (left, _, _) in requests.items() if left <= 1e-6]:
                _, token, start = requests.pop(name)
                done.append(Done(token, f"value of {name}", start, self.clock))
        return done

    def _advance(self, elapsed_us):
        for lane, requests in enumerate(self.active):
            if requests and lane not in self.exclusive:
                step = elapsed_us / self.costs.batch_us(list(requests), lane)
                for request in requests.values():
                    request[0] -= step
        self.clock += elapsed_us


class Plain:
    """An order is the task itself; remembers which values came with it."""

    def __init__(self):
        self.values = {}

    def order(self, task, values):
        self.values[task.id] = dict(values)
        return task

    def control(self, task, values):
        self.values[task.id] = dict(values)
        return f"value of {task.id}"


class World:
    """One schedule on the scripted backend."""

    def __init__(self, monkeypatch, placement, serving="dynamic", **fields):
        self.workload = small(candidates=8, group_size=4, trained_steps=2, **fields)
        full = profile_of(
            serving, 0.907, 0.113, link=LinkCost(latency_us=17, bytes_per_s=1000), sizes_bytes=SIZES, **TIMES
        )
        self.profile, self.serving = full, serving
        self.graph, self.assignment = build(self.workload, placement)
        self.cluster = Cluster.equal(len(self.graph.lanes), "gpu")
        self.backend = Scripted(self.graph, full, self.cluster, self.workload.trained_steps)
        self.step = Plain()
        monkeypatch.setattr(controller, "now_us", lambda: self.backend.clock)

    def run(self):
        index = GraphIndex(self.graph, self.profile)
        return run_step(index, self.assignment, self.serving, self.backend, self.step)

    def predicted(self):
        return simulate(self.graph, self.assignment, self.profile, self.cluster, self.workload.trained_steps)


def spans(timeline):
    """(task, gpu, ready, start, end) of all but the judge's batches made on the fly."""
    return sorted(
        (row.task, row.gpu, row.ready_us, row.start_us, row.end_us)
        for row in timeline.rows
        if row.kind != "score" or "gpu" in row.task
    )


MOVED = {"vae_moved": 5, "train_moved": (2, 1)}


@pytest.mark.parametrize("serving", ["serial", "dynamic"])
@pytest.mark.parametrize("scoring", ["on_arrival", "per_mini_batch", "one_batch"])
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_the_measured_step_is_the_predicted_one(monkeypatch, schedule, scoring, serving):
    moved = MOVED if schedule == "stagebreaker" else {}
    world = World(monkeypatch, place(schedule, 3, 2, scoring=scoring, **moved), serving)
    measured, predicted = world.run().timeline, world.predicted()
    assert spans(measured) == spans(predicted)
    assert measured.makespan_us == predicted.makespan_us
    batches = [
        sorted((r.members, r.gpu, r.start_us, r.end_us) for r in t.rows if r.kind == "score")
        for t in (measured, predicted)
    ]
    assert batches[0] == batches[1]


@pytest.mark.parametrize("schedule", ["stagebreaker", "async_reward"])
@pytest.mark.parametrize("shape", ["pointwise", "all_pairs"])
def test_continuous_serving_is_the_predicted_one_too(monkeypatch, schedule, shape):
    """Requests advance together and pause under a decode; rounding may differ by a few us."""
    moved = MOVED if schedule == "stagebreaker" else {}
    world = World(monkeypatch, place(schedule, 3, 2, **moved), "continuous", reward_shape=shape)
    timelines = world.run().timeline, world.predicted()
    measured, predicted = map(spans, timelines)
    assert [span[:2] for span in measured] == [span[:2] for span in predicted]
    for got, want in zip(measured, predicted, strict=True):
        assert got[2:] == pytest.approx(want[2:], abs=20)
    judging = [
        {
            g: sum(r.end_us - r.start_us for r in t.rows if (r.kind, r.gpu) == ("score", g))
            for g in ("reward0", "reward1")
        }
        for t in timelines
    ]
    assert judging[0] == pytest.approx(judging[1], abs=50)


@pytest.mark.parametrize("serving", ["serial", "dynamic", "continuous"])
def test_busy_spans_of_a_lane_never_overlap(monkeypatch, serving):
    world = World(monkeypatch, place("stagebreaker", 3, 2, **MOVED), serving)
    timeline = world.run().timeline
    for name in [lane.name for lane in timeline.lanes] + [f"link:{lane.name}" for lane in timeline.lanes]:
        rows = timeline.spans(name)
        assert rows or name == "link:reward1"
        for earlier, later in itertools.pairwise(rows):
            assert earlier.end_us <= later.start_us, (name, earlier.task, later.task)
    for use in timeline.use(world.graph):
        assert use.busy_us + use.overhead_us + sum(use.idle_us.values()) == timeline.makespan_us
        assert use.idle_us["wait:controller"] == 0
    assert all(row.ready_us <= row.start_us <= row.end_us for row in timeline.rows)


def test_lanes_take_their_queues_in_order(monkeypatch):
    world = World(monkeypatch, place("merged_replay", 3, 2))
    world.run()
    for lane, queue in world.assignment.order.items():
        started = [task for _, name, task in world.backend.log if name == lane and task in world.graph.by_id]
        assert tuple(task for task in started if not task.startswith("request")) == queue


@pytest.mark.parametrize(
    ("serving", "batches"),
    [
        ("serial", [["0"], ["1"], ["2"], ["3"], ["4"], ["5"], ["6"], ["7"]]),
        ("dynamic", [["0"], ["1", "2"], ["3", "4", "5"], ["6", "7"]]),
    ],
)
def test_requests_are_served_as_the_judge_serves(monkeypatch, serving, batches):
    """Frames arrive in threes every 1.53 s; a batch of b takes 0.907 + 0.113 b seconds."""
    world = World(monkeypatch, place("merged_replay", 3, 1), serving)
    timeline = world.run().timeline
    rows = sorted((r for r in timeline.rows if r.kind == "score" and r.gpu == "reward0"), key=lambda r: r.start_us)
    assert [row.members.split() for row in rows] == batches
    assert [row.task for row in rows] == [f"score:reward0#{n}" for n in range(len(batches))]
    assert sorted(r.task for r in timeline.rows if r.kind == "request") == [f"request:{i}" for i in range(8)]


def test_continuous_requests_share_one_span_that_a_decode_interrupts(monkeypatch):
    world = World(monkeypatch, place("stagebreaker", 3, 1, vae_moved=8), "continuous")
    timeline = world.run().timeline
    rows = timeline.spans("reward0")
    decodes = [row for row in rows if row.kind == "vae_decode"]
    judged = [row for row in rows if row.kind == "score"]
    assert len(decodes) == 8
    assert judged
    assert {m for row in judged for m in row.members.split()} == {str(i) for i in range(8)}
    for row in judged:
        assert all(row.end_us <= d.start_us or d.end_us <= row.start_us for d in decodes)


def test_small_results_reach_the_tasks_that_need_them(monkeypatch):
    world = World(monkeypatch, place("async_reward", 2, 1), old_logprob_source="recompute")
    result = world.run()
    seen = world.step.values
    assert seen["loss_replay:5"]["old_replay:5"] == "value of old_replay:5"
    assert seen["grad_replay:5"]["loss_replay:5"] == "value of loss_replay:5"
    assert seen["grad_replay:5"]["advantage:1"] == "value of advantage:1"
    assert seen["advantage:1"] == {f"request:{i}": seen_batch(result, i) for i in range(4, 8)}
    assert result.values["update:1"] == "value of update:1"
    assert set(result.values) == set(world.graph.by_id)


def seen_batch(result, i):
    """The value of the batch that request i was served in."""
    (batch,) = [r.task for r in result.timeline.rows if r.kind == "score" and str(i) in r.members.split()]
    return f"value of {batch}"


def test_scores_in_any_order_go_to_their_own_candidates(monkeypatch):
    """Requests of candidates 1 and 0 end in the other order: each value keeps its name."""
    world = World(monkeypatch, place("merged_replay", 2, 2), "continuous")
    result = world.run()
    for i in range(8):
        assert result.values[f"request:{i}"] == f"value of request:{i}"


def test_a_failure_ends_the_step_at_once(monkeypatch):
    world = World(monkeypatch, place("merged_replay", 3, 2))
    world.backend.fails = "grad_replay:4"
    with pytest.raises(TaskFailedError, match="task grad_replay:4 on actor1 failed: RuntimeError: broken"):
        world.run()
    assert not {"fold:4", "update:1"} & {task for _, _, task in world.backend.log}


def test_queues_that_cannot_be_emptied_are_named(monkeypatch):
    world = World(monkeypatch, place("merged_replay", 1, 1))
    order = dict(world.assignment.order)
    queue = list(order["actor0"])
    queue.remove("grad_replay:3")
    order["actor0"] = (*queue, "grad_replay:3")
    world.assignment = Assignment(world.assignment.lane_of, order, world.assignment.serve_after)
    with pytest.raises(DeadlockError, match=r"actor0 waits for fold:3 \(missing: grad_replay:3\)"):
        world.run()


def test_transfers_leave_one_by_one_in_the_order_they_became_due(monkeypatch):
    """The scripted link refuses two at once; their rows say when each could have left."""
    world = World(monkeypatch, place("merged_replay", 1, 2), deterministic=False)
    timeline = world.run().timeline
    rows = timeline.spans("link:actor0")
    assert [row.task for row in rows if row.task.endswith("frames>reward0")] == [
        f"transfer:vae_decode:{i}/frames>reward0" for i in range(0, 8, 2)
    ]
    assert all(row.kind == ("sync" if "adapter" in row.task else "transfer") for row in rows)
    assert sorted(rows, key=lambda row: row.ready_us) == rows
