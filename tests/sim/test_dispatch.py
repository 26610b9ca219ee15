"""The rules both interpreters share: what may start, what travels where and in which order."""

import pytest
from builders import profile_of

from stagebreaker.profiles.document import InputError
from stagebreaker.sim.dataflow import Assignment, Lane, Need, StepGraph, Task
from stagebreaker.sim.dispatch import Dispatch, GraphIndex

LANES = (Lane("a", "actor", 0), Lane("b", "reward", 1), Lane("c", "reward", 2))
SIZES = {"latents": 3, "trajectory": 5, "gradient": 7, "adapter": 11, "frames": 13}


def dispatch_of(tasks, lane_of, serve_after=None):
    """Queues in the order of ``lane_of``, requests in none."""
    order = {
        lane.name: tuple(t for t in lane_of if lane_of[t] == lane.name and not t.startswith("request"))
        for lane in LANES
    }
    index = GraphIndex(StepGraph(tuple(tasks), LANES), profile_of(sizes_bytes=SIZES))
    return Dispatch(index, Assignment(lane_of, order, serve_after or {})), index.index


def begun(dispatch):
    assert dispatch.begin() == dispatch.index.roots
    return dispatch


def chain():
    return dispatch_of(
        [
            Task("generate:0", "generate"),
            Task("vae_decode:0", "vae_decode", (Need("generate:0", "latents"),)),
            Task("grad_replay:0", "grad_replay", (Need("generate:0", "trajectory"),)),
            Task("old_replay:0", "old_replay", (Need("generate:0", "trajectory"),)),
        ],
        {"generate:0": "a", "vae_decode:0": "c", "old_replay:0": "b", "grad_replay:0": "b"},
    )


def test_a_lane_takes_its_queue_in_order_and_only_when_inputs_are_in():
    dispatch, n = chain()
    begun(dispatch)
    assert [dispatch.next_task(lane) for lane in range(3)] == [n["generate:0"], None, None]
    dispatch.take_task(0)
    assert dispatch.next_task(0) is None
    assert dispatch.finished(0)
    _, transfers = dispatch.complete(n["generate:0"], 7)
    for transfer in transfers:
        assert dispatch.next_task(transfer.target) is None
        dispatch.arrive(transfer.users, 9)
    assert [dispatch.next_task(lane) for lane in range(3)] == [None, n["old_replay:0"], n["vae_decode:0"]]
    assert [dispatch.available_us[n[task]] for task in ("generate:0", "old_replay:0", "vae_decode:0")] == [0, 9, 9]


def test_transfers_leave_by_target_lane_then_data_and_once_per_lane():
    dispatch, n = chain()
    begun(dispatch)
    _, transfers = dispatch.complete(n["generate:0"], 7)
    assert [(t.source, t.target, t.data, t.size_bytes) for t in transfers] == [
        (n["generate:0"], 1, "trajectory", 5),
        (n["generate:0"], 2, "latents", 3),
    ]
    assert sorted(transfers[0].users) == sorted([n["old_replay:0"], n["grad_replay:0"]])


def test_data_for_the_same_lane_or_the_controller_does_not_travel():
    dispatch, n = dispatch_of(
        [
            Task("grad_replay:0", "grad_replay"),
            Task("advantage:0", "advantage", (Need("grad_replay:0", "gradient"),)),
            Task("fold:0", "fold", (Need("grad_replay:0", "gradient"), Need("advantage:0", "gradient"))),
        ],
        {"grad_replay:0": "a", "fold:0": "a"},
    )
    begun(dispatch)
    dispatch.take_task(0)
    ready, transfers = dispatch.complete(n["grad_replay:0"], 7)
    assert (ready, transfers) == ([n["advantage:0"]], ())
    assert dispatch.next_task(0) is None
    assert dispatch.complete(n["advantage:0"], 7) == ([n["fold:0"]], ())
    assert dispatch.next_task(0) == n["fold:0"]


def test_both_sign_gradients_are_two_gradients():
    dispatch, n = dispatch_of(
        [
            Task("grad_replay:0", "grad_replay"),
            Task("fold:0", "fold", (Need("grad_replay:0", "sign_gradients"),)),
        ],
        {"grad_replay:0": "b", "fold:0": "a"},
    )
    begun(dispatch)
    _, (transfer,) = dispatch.complete(n["grad_replay:0"], 7)
    assert transfer.size_bytes == 14


def test_update_sends_the_adapter_to_every_other_lane_with_a_policy():
    dispatch, n = dispatch_of(
        [
            Task("update:0", "update"),
            Task("generate:0", "generate"),
            Task("vae_decode:0", "vae_decode"),
            Task("grad_replay:0", "grad_replay", (Need("update:0", "adapter"),)),
        ],
        {"update:0": "a", "generate:0": "b", "vae_decode:0": "c", "grad_replay:0": "b"},
    )
    begun(dispatch)
    _, transfers = dispatch.complete(n["update:0"], 7)
    assert [(t.target, t.data, t.size_bytes, t.users) for t in transfers] == [(1, "adapter", 11, (n["grad_replay:0"],))]


def served():
    tasks = [Task(f"request:{i}", "request", members=(str(i),)) for i in range(3)]
    tasks += [Task("vae_decode:0", "vae_decode"), Task("grad_replay:0", "grad_replay")]
    lane_of = {f"request:{i}": "b" for i in range(3)} | {"vae_decode:0": "b", "grad_replay:0": "b"}
    return dispatch_of(tasks, lane_of, serve_after={"b": 1})


def test_a_judge_decodes_first_and_replays_last():
    dispatch, n = served()
    begun(dispatch)
    assert dispatch.next_task(1) == n["vae_decode:0"]
    dispatch.take_task(1)
    assert dispatch.next_task(1) is None
    for request in dispatch.take_requests(1, "dynamic"):
        dispatch.request_done(1)
        dispatch.complete(request, 7)
    assert dispatch.next_task(1) == n["grad_replay:0"]
    assert not dispatch.finished(1)
    dispatch.take_task(1)
    assert dispatch.finished(1)


@pytest.mark.parametrize(("serving", "sizes"), [("serial", [1, 1, 1, 0]), ("dynamic", [3, 0]), ("continuous", [3, 0])])
def test_serving_modes_admit_one_request_or_all_that_wait(serving, sizes):
    dispatch, n = served()
    begun(dispatch)
    taken = [dispatch.take_requests(1, serving) for _ in sizes]
    assert [len(batch) for batch in taken] == sizes
    assert [r for batch in taken for r in batch] == [n[f"request:{i}"] for i in range(3)]


def test_blocked_lanes_are_reported():
    dispatch, _ = chain()
    begun(dispatch)
    lines = dispatch.blocked()
    assert len(lines) == 3
    assert "b waits for old_replay:0" in lines[1]
    assert "generate:0" in lines[1]


def test_a_size_that_no_edge_needs_may_be_absent_and_another_may_not():
    profile = profile_of()
    sizes = {k: v for k, v in profile.sizes_bytes.items() if k != "latents"}
    profile = profile.model_copy(update={"sizes_bytes": sizes})
    needless = StepGraph((Task("generate:0", "generate"),), LANES)
    assert GraphIndex(needless, profile).adapter_bytes == 0
    tasks = (
        Task("generate:0", "generate"),
        Task("vae_decode:0", "vae_decode", (Need("generate:0", "latents"),)),
    )
    with pytest.raises(InputError, match=r"no sizes_bytes\.latents"):
        GraphIndex(StepGraph(tasks, LANES), profile)


@pytest.mark.parametrize(
    ("tasks", "message"),
    [
        ([Task("x", "fold"), Task("x", "fold")], "task x stands twice"),
        ([Task("x", "fold", (Need("y"),))], "task x needs y, which is not in the step graph"),
        ([Task("x", "fold", (Need("y"),)), Task("y", "fold", (Need("x"),))], "a cycle through x, y"),
    ],
)
def test_graphs_that_are_no_graphs_are_refused(tasks, message):
    with pytest.raises(ValueError, match=message):
        StepGraph(tuple(tasks), LANES)


def test_topological_order_respects_needs():
    graph = dispatch_of([Task("b", "fold", (Need("a"),)), Task("a", "fold")], {"a": "a", "b": "a"})[0].index.graph
    assert [task.id for task in graph.topological] == ["a", "b"]
