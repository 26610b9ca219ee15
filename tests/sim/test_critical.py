"""The critical path, by hand on small steps; on any simulated step it has no gap."""

from dataclasses import replace
from itertools import pairwise

from builders import SECOND, placement_of, profile_of, simulated, workload_of
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from strategies import fixed_orders, scheduled

from stagebreaker.profiles.table import LinkCost
from stagebreaker.sim.critical import GAP, by_kind, critical_path
from stagebreaker.sim.dataflow import REQUEST
from stagebreaker.sim.plan import SCORING
from stagebreaker.sim.timeline import Timeline

RANDOM = settings(deadline=None, suppress_health_check=list(HealthCheck), max_examples=120)
TWO = profile_of(generate=10, t0=30, grad_replay=20, loss_replay=5, update=2)


def path_of(schedule, profile=TWO, workload=None, **placed):
    """(task, start, end) of every piece, in seconds."""
    placement = placement_of(schedule, **{"scoring": "on_arrival"} | placed)
    timeline, graph = simulated(workload or workload_of(), placement, profile)
    return [(s.task, s.start_us / SECOND, s.end_us / SECOND) for s in critical_path(timeline, graph)]


# -- two candidates, one actor, one reward GPU: rollout 10 s, score 30 s, train 20 s --


def test_scores_decide_when_they_are_slower_than_training():
    expected = [("generate:0", 0, 10), ("request:0", 10, 40), ("request:1", 40, 70), ("update:0", 70, 72)]
    assert path_of("merged_replay") == expected


def test_training_decides_when_it_is_slower_than_scoring():
    profile = profile_of(generate=10, t0=5, grad_replay=20)
    expected = [("generate:0", 0, 10), ("generate:1", 10, 20), ("grad_replay:0", 20, 40), ("grad_replay:1", 40, 60)]
    assert path_of("merged_replay", profile) == expected


def test_stage_by_stage_the_path_goes_through_the_scores_and_a_barrier():
    path = path_of("async_reward")
    assert [task for task, _, _ in path] == [
        "generate:0",
        "request:0",
        "request:1",
        "loss_replay:0",
        "loss_replay:1",
        "grad_replay:0",
        "grad_replay:1",
        "update:0",
    ]
    assert path[-1] == ("update:0", 120, 122)


def test_switches_lie_on_the_path_of_a_colocated_step():
    kinds = [task.split(":")[0] for task, _, _ in path_of("colocated", profile_of(generate=10, t0=30, switch=1))]
    assert kinds == ["generate", "switch", "score", "switch"]


def test_a_slow_link_is_on_the_path_and_so_is_the_parcel_before():
    """Frames take 3 s each on one link: the second leaves behind the first, long after it was made."""
    link = LinkCost(bytes_per_s=10)
    profile = profile_of("dynamic", t0=3, generate=1, vae_decode=0, link=link, sizes_bytes={"latents": 5, "frames": 30})
    path = path_of("merged_replay", profile)
    assert path == [
        ("generate:0", 0, 1),
        ("transfer:vae_decode:0/frames>reward0", 1, 4),
        ("transfer:vae_decode:1/frames>reward0", 4, 7),
        ("request:1", 7, 10),
    ]


def test_an_update_travels_to_the_gpu_whose_training_ends_the_step():
    workload = workload_of(candidates=4, group_size=2, mini_batches=2)
    link = LinkCost(bytes_per_s=10)
    profile = profile_of(grad_replay=20, generate=1, update=2, link=link, sizes_bytes={"adapter": 30})
    path = path_of("merged_replay", profile, workload, actors=2)
    assert path[2:4] == [("grad_replay:0", 2, 22), ("update:0", 22, 24)]
    assert path[4:] == [
        ("sync:update:0/adapter>actor1", 24, 27),
        ("grad_replay:3", 27, 47),
        ("update:1", 47, 49),
        ("sync:update:1/adapter>actor1", 49, 52),
    ]


def test_a_request_pauses_while_its_gpu_decodes():
    """Request 1 joins at 40 s and needs 30 s of its judge, which decodes videos 2 and 3 in between; 20 s on top."""
    profile = profile_of("continuous", t0=30, generate=15, vae_decode=10, grad_replay=10)
    workload = workload_of(candidates=4, group_size=2, mini_batches=2)
    assert path_of("stagebreaker", profile, workload, vae_moved=4) == [
        ("generate:0", 0, 15),
        ("generate:1", 15, 30),
        ("vae_decode:1", 30, 40),
        ("request:1", 40, 45),
        ("vae_decode:2", 45, 55),
        ("request:1", 55, 60),
        ("vae_decode:3", 60, 70),
        ("request:1", 70, 90),
        ("grad_replay:2", 90, 100),
        ("grad_replay:3", 100, 110),
    ]


def test_time_by_kind_is_the_makespan_and_longest_first():
    timeline, graph = simulated(workload_of(), placement_of("merged_replay", scoring="on_arrival"), TWO)
    kinds = by_kind(critical_path(timeline, graph))
    assert list(kinds.items()) == [("score", 60 * SECOND), ("generate", 10 * SECOND), ("update", 2 * SECOND)]


def test_a_step_of_no_length_has_no_path():
    timeline, graph = simulated(workload_of(), placement_of("merged_replay"), profile_of())
    assert timeline.makespan_us == 0
    assert critical_path(timeline, graph) == ()
    assert critical_path(Timeline((), timeline.lanes), graph) == ()


# -- any simulated step --


def check(case):
    timeline = case.timeline()
    path = critical_path(timeline, case.graph)
    spans = {row.task: row for row in timeline.rows}
    assert [p.start_us for p in path[:1]] == [0] * bool(timeline.makespan_us)
    assert [p.end_us for p in path[-1:]] == [timeline.makespan_us] * bool(timeline.makespan_us)
    for earlier, later in pairwise(path):
        assert earlier.end_us == later.start_us
    for piece in path:
        assert piece.start_us < piece.end_us
        span = spans[piece.task]  # a gap has none
        assert piece.gpu == span.gpu
        assert span.start_us <= piece.start_us
        assert piece.end_us <= span.end_us
        assert span.kind == REQUEST or (piece.kind, span.start_us, span.end_us) == (
            span.kind,
            piece.start_us,
            piece.end_us,
        )
    assert sum(by_kind(path).values()) == timeline.makespan_us
    return path


@RANDOM
@given(scheduled())
def test_the_pieces_touch_and_cover_the_makespan(case):
    check(case)


@RANDOM
@given(scheduled(scorings=("on_arrival",)))
def test_they_do_so_where_a_judge_serves_requests(case):
    check(case)


@RANDOM
@given(fixed_orders())
def test_they_do_so_on_any_graph(case):
    check(case)


@settings(RANDOM, max_examples=60)
@given(st.data())
def test_creation_order_changes_no_piece(data):
    case = data.draw(st.one_of(scheduled(SCORING), fixed_orders()))
    other = case.created_in(data.draw(st.permutations(range(len(case.graph.tasks)))))
    assert critical_path(other.timeline(), other.graph) == critical_path(case.timeline(), case.graph)


# -- measured steps --


def test_time_that_no_span_explains_is_a_gap():
    timeline, graph = simulated(workload_of(), placement_of("merged_replay", scoring="on_arrival"), TWO)
    late = tuple(
        replace(row, start_us=row.start_us + 3 * SECOND, end_us=row.end_us + 5 * SECOND)
        if row.kind == "update"
        else replace(row, start_us=row.start_us + SECOND, end_us=row.end_us + SECOND)
        for row in timeline.rows
    )
    path = critical_path(Timeline(late, timeline.lanes), graph)
    gaps = [(p.start_us // SECOND, p.end_us // SECOND) for p in path if p.kind == GAP]
    assert gaps == [(0, 1), (71, 73)]
    assert [p.task for p in path if p.kind == GAP] == ["", ""]
    assert sum(by_kind(path).values()) == 77 * SECOND


def test_clocks_that_disagree_make_no_piece_overlap():
    """A span that seems to start before its input is over: the input's piece is cut there."""
    profile = profile_of(generate=10, t0=30, fold=4, update=2)
    timeline, graph = simulated(workload_of(), placement_of("merged_replay", scoring="on_arrival"), profile)
    odd = tuple(replace(r, start_us=r.start_us - SECOND) if r.kind == "update" else r for r in timeline.rows)
    path = critical_path(Timeline(odd, timeline.lanes), graph)
    assert [(p.task, p.start_us // SECOND, p.end_us // SECOND) for p in path[-3:]] == [
        ("fold:0", 70, 74),
        ("fold:1", 74, 77),
        ("update:0", 77, 80),
    ]


def test_a_batch_without_rows_of_its_requests_stands_for_them():
    profile = profile_of("dynamic", t0=30, generate=10)
    timeline, graph = simulated(workload_of(), placement_of("merged_replay", scoring="on_arrival"), profile)
    bare = Timeline(tuple(r for r in timeline.rows if r.kind != REQUEST), timeline.lanes)
    assert [p.task for p in critical_path(bare, graph)] == ["generate:0", "score:reward0#0", "score:reward0#1"]
