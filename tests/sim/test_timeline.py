"""Where the time of a lane goes: busy, overhead and idle pieces tile the step, whatever the schedule."""

from dataclasses import replace

import pytest
from builders import SECOND, placement_of, profile_of, simulated, workload_of
from hypothesis import HealthCheck, given, reject, settings
from hypothesis import strategies as st
from strategies import fixed_orders, placements, profiles, workloads

from stagebreaker.profiles.document import InputError
from stagebreaker.profiles.table import LinkCost
from stagebreaker.sim.dataflow import OVERHEAD_KINDS
from stagebreaker.sim.engine import simulate
from stagebreaker.sim.schedules import SCHEDULES, build, why_not
from stagebreaker.sim.timeline import IDLE_CAUSES, Idle, Timeline, Waits, link_ends
from stagebreaker.sim.workload import Cluster

RANDOM = settings(deadline=None, suppress_health_check=list(HealthCheck), max_examples=15)


def check(timeline, graph):
    """Spans and idle pieces of a lane follow one another from 0 to the makespan, and the sums say the same."""
    idle = timeline.idle(graph)
    assert list(idle) == [lane.name for lane in timeline.lanes]
    for use in timeline.use(graph):
        spans = timeline.spans(use.lane.name)
        pieces = [(row.start_us, row.end_us) for row in spans if row.start_us < row.end_us]
        pieces += [(piece.start_us, piece.end_us) for piece in idle[use.lane.name]]
        clock = 0
        for start_us, end_us in sorted(pieces):
            assert start_us == clock < end_us
            clock = end_us
        assert clock == timeline.makespan_us
        assert set(use.idle_us) == set(IDLE_CAUSES)
        assert use.busy_us + use.overhead_us + sum(use.idle_us.values()) == timeline.makespan_us
        assert use.overhead_us == sum(r.end_us - r.start_us for r in spans if r.kind in OVERHEAD_KINDS)
        for cause in IDLE_CAUSES:
            lengths = [p.end_us - p.start_us for p in idle[use.lane.name] if p.cause == cause]
            assert use.idle_us[cause] == sum(lengths)


@pytest.mark.parametrize("schedule", sorted(SCHEDULES))
@RANDOM
@given(data=st.data())
def test_busy_overhead_and_idle_tile_every_lane_of_every_schedule(schedule, data):
    workload = data.draw(workloads().filter(lambda w: why_not(schedule, w) is None))
    placement = data.draw(placements(workload)).model_copy(update={"schedule": schedule, "splits": ()})
    if not SCHEDULES[schedule].movable:
        still = {"vae_moved": 0, "train_moved": (), "ref_moved": (), "old_moved": ()}
        placement = placement.model_copy(update=still)
    try:
        graph, assignment = build(workload, placement)
    except InputError:
        reject()  # counts that this workload does not have
    cluster = Cluster.equal(len(graph.lanes), "kind0")
    check(simulate(graph, assignment, data.draw(profiles()), cluster, workload.trained_steps), graph)


@RANDOM
@given(fixed_orders())
def test_they_tile_the_lanes_of_any_graph(case):
    check(case.timeline(), case.graph)


def test_idle_pieces_say_what_a_gap_was_spent_on_in_time_order():
    """The actor waits for scores until 70 s; the judge first for a latent, then its work is over."""
    profile = profile_of(generate=10, t0=30, grad_replay=20)
    timeline, graph = simulated(workload_of(), placement_of("async_reward_merged", scoring="on_arrival"), profile)
    idle = timeline.idle(graph)
    assert idle["actor0"] == [Idle("wait:reward", 20 * SECOND, 70 * SECOND)]
    assert idle["reward0"] == [Idle("wait:latents", 0, 10 * SECOND), Idle("tail", 70 * SECOND, 110 * SECOND)]


def test_waiting_behind_another_parcel_on_a_link_is_waiting_for_a_transfer():
    """Frames take 3 s each: the second is made at 2 s, leaves at 4 s and is there at 7 s."""
    link = LinkCost(bytes_per_s=10)
    profile = profile_of("dynamic", generate=1, link=link, sizes_bytes={"frames": 30})
    timeline, graph = simulated(workload_of(), placement_of("merged_replay", scoring="one_batch"), profile)
    uses = {use.lane.name: use for use in timeline.use(graph)}
    assert uses["reward0"].idle_us["wait:transfer"] == 6 * SECOND
    assert uses["reward0"].idle_us["wait:latents"] == SECOND


def test_a_gap_that_no_input_explains_is_the_controllers():
    profile = profile_of(generate=10, t0=30)
    timeline, graph = simulated(workload_of(), placement_of("merged_replay", scoring="on_arrival"), profile)
    late = tuple(replace(r, start_us=r.start_us + 2, end_us=r.end_us + 2) for r in timeline.rows)
    assert Timeline(late, timeline.lanes).idle(graph)["actor0"][0] == Idle("wait:controller", 0, 2)


def test_what_a_span_waited_for_last():
    profile = profile_of(generate=10, t0=30, grad_replay=20, update=1)
    timeline, graph = simulated(workload_of(), placement_of("merged_replay", scoring="on_arrival"), profile)
    waits = Waits(timeline, graph)
    row = {r.task: r for r in timeline.rows}

    def last(task):
        found = waits.latest(row[task])
        return None if found is None else found.task

    assert last("generate:0") is None
    assert last("generate:1") == "generate:0"
    assert last("request:1") == "request:0", "a serial judge was at work"
    assert last("update:0") == "request:1", "seen through a fold of no length"
    assert last("grad_replay:0") == "generate:1", "its own lane, not its own trajectory"


def test_the_ends_of_a_link_row():
    assert link_ends("transfer:generate:3/latents>reward1") == ("generate:3", "latents", "reward1")
    assert link_ends("sync:update:0/adapter>gpu0") == ("update:0", "adapter", "gpu0")
