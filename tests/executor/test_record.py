"""Measured beside predicted: matched task by task, batches formed on the fly by their requests."""

import pytest
from builders import placement_of, profile_of, simulated, workload_of

from stagebreaker.executor.record import KindComparison, compare, middle, scaled
from stagebreaker.sim.dataflow import Lane
from stagebreaker.sim.timeline import Row, Timeline

LANES = (Lane("actor0", "actor", 0), Lane("reward0", "reward", 1))


def row(task, start, end, gpu="actor0", members="", ready=None):
    kind = task.split(":")[0]
    return Row(task, kind, None, "", "", members, None, gpu, "actor", start if ready is None else ready, start, end)


def timeline(*rows):
    return Timeline(rows, LANES)


def test_kinds_have_medians_and_ratios():
    predicted = timeline(row("generate:0", 0, 10), row("generate:1", 10, 20), row("generate:2", 20, 40))
    measured = timeline(row("generate:2", 20, 26), row("generate:0", 0, 12), row("generate:1", 12, 20))
    found = compare(predicted, measured)
    assert found.kinds == (KindComparison("generate", 3, 10, 8),)
    assert found.kinds[0].ratio == 0.8
    assert (found.matched, found.unmatched) == (3, ())


def test_what_is_on_one_side_only_is_named():
    found = compare(timeline(row("fold:0", 0, 1), row("fold:1", 1, 2)), timeline(row("fold:1", 0, 3), row("x:9", 3, 4)))
    assert found.kinds == (KindComparison("fold", 1, 1, 3),)
    assert found.unmatched == ("fold:0", "x:9")


def test_nothing_predicted_has_no_ratio():
    assert compare(timeline(row("sync:a", 0, 0)), timeline(row("sync:a", 0, 5))).kinds[0].ratio is None


def test_requests_stand_for_batches_that_came_out_differently():
    together = timeline(
        row("score:reward0#0", 0, 10, "reward0", "0 1"),
        row("request:0", 0, 10, "reward0", "0"),
        row("request:1", 0, 10, "reward0", "1"),
    )
    apart = timeline(
        row("score:reward0#0", 0, 6, "reward0", "0"),
        row("score:reward0#1", 6, 13, "reward0", "1"),
        row("request:0", 0, 6, "reward0", "0"),
        row("request:1", 6, 13, "reward0", "1"),
    )
    found = compare(together, apart)
    assert found.kinds == (KindComparison("request", 2, 10, 6),)
    assert found.unmatched == ()


def test_planned_batches_are_matched_by_id():
    predicted = timeline(row("score:reward0#0", 0, 10, "reward0", "0 1"))
    assert compare(predicted, timeline(row("score:reward0#0", 3, 15, "reward0", "0 1"))).kinds == (
        KindComparison("score", 1, 10, 12),
    )


@pytest.mark.parametrize("schedule", ["colocated", "stagebreaker", "async_reward"])
def test_a_simulated_step_matches_itself(schedule):
    workload = workload_of(candidates=4, group_size=2, mini_batches=2)
    made, _ = simulated(workload, placement_of(schedule, scoring="on_arrival"), profile_of(generate=2, grad_replay=3))
    found = compare(made, made)
    assert found.unmatched == ()
    assert all(kind.predicted_us == kind.measured_us for kind in found.kinds)
    assert {"generate", "grad_replay", "update"} <= {kind.kind for kind in found.kinds}


def test_scaling_keeps_ids_and_multiplies_times():
    made = scaled(timeline(row("fold:0", 3, 5, ready=1), row("fold:1", 5, 8)), 2.5)
    assert [(r.task, r.ready_us, r.start_us, r.end_us) for r in made.rows] == [
        ("fold:0", 2, 8, 12),
        ("fold:1", 12, 12, 20),
    ]
    assert made.makespan_us == 20
    assert made.lanes == LANES


@pytest.mark.parametrize(
    ("lengths", "want"), [((5,), 0), ((9, 3), 1), ((4, 9, 6), 2), ((7, 7, 7), 1), ((1, 9, 2, 8), 2)]
)
def test_the_middle_step(lengths, want):
    assert middle([timeline(row("fold:0", 0, length)) for length in lengths]) == want
