"""The graphs that schedules build: which edges they have, which not, and what that makes of a step."""

from importlib import resources

import pytest
from builders import SECOND, ancestors, needs, placement_of, profile_of, simulated, workload_of

from stagebreaker.profiles.document import InputError
from stagebreaker.profiles.table import Profile
from stagebreaker.sim.dataflow import REQUEST
from stagebreaker.sim.plan import Split
from stagebreaker.sim.schedules import SCHEDULES, build, schedule_named
from stagebreaker.sim.workload import load_workload

EIGHT = {"candidates": 8, "group_size": 4, "mini_batches": 2}
EARLY = ["async_train", "merged_replay", "stagebreaker", "lean"]
MERGED = ["merged_replay", "stagebreaker", "colocated_merged", "async_reward_merged", "lean", "one_step_off"]
REPLAYING = [name for name in SCHEDULES if name != "lean"]
"""Schedules with a replay for every candidate."""


def graph_of(schedule="merged_replay", placement=None, **fields):
    where = {"scoring": "on_arrival"} | (placement or {})
    return build(workload_of(**EIGHT | fields), placement_of(schedule, **where))[0]


def ids(graph, kind):
    return [task.id for task in graph.of_kind(kind)]


def queues(schedule, placement, **fields):
    return build(workload_of(**EIGHT | fields), placement_of(schedule, **placement))[1].order


# -- replays -----------------------------------------------------------------------------------------


def test_schedule_table():
    assert list(SCHEDULES) == [
        "colocated",
        "async_reward",
        "async_train",
        "merged_replay",
        "stagebreaker",
        "colocated_merged",
        "async_reward_merged",
        "lean",
        "one_step_off",
    ]
    assert [s.name for s in SCHEDULES.values() if s.early] == EARLY
    assert [s.name for s in SCHEDULES.values() if s.off_policy] == ["one_step_off"]
    assert {s.name for s in SCHEDULES.values() if s.merged} == set(MERGED)
    assert [s.name for s in SCHEDULES.values() if s.everywhere] == ["colocated", "colocated_merged"]
    assert [s.name for s in SCHEDULES.values() if s.ours] == EARLY


def test_unknown_schedule_names_the_nearest():
    with pytest.raises(InputError, match="did you mean 'merged_replay'"):
        schedule_named("merge_replay")


@pytest.mark.parametrize("schedule", REPLAYING)
def test_merged_schedules_replay_once_and_the_others_twice(schedule):
    graph = graph_of(schedule)
    loss = [] if schedule in MERGED else [f"loss_replay:{i}" for i in range(8)]
    assert ids(graph, "grad_replay") == [f"grad_replay:{i}" for i in range(8)]
    assert ids(graph, "loss_replay") == loss
    assert ids(graph, "old_replay") == []


def test_a_barrier_divides_loss_and_grad_replays_of_a_mini_batch():
    graph = graph_of("async_train")
    assert needs(graph, "barrier:loss1").keys() == {f"loss_replay:{i}" for i in range(4, 8)}
    for i in range(8):
        assert {f"barrier:loss{i // 4}", f"loss_replay:{i}"} <= needs(graph, f"grad_replay:{i}").keys()


@pytest.mark.parametrize(
    ("source", "replayed"),
    [("rollout", range(0)), ("first_replay", range(4, 8)), ("recompute", range(8))],
)
def test_old_logprob_source(source, replayed):
    graph = graph_of(old_logprob_source=source)
    assert ids(graph, "old_replay") == [f"old_replay:{i}" for i in replayed]
    for i in range(8):
        assert (f"old_replay:{i}" in needs(graph, f"grad_replay:{i}")) == (i in replayed)


@pytest.mark.parametrize("schedule", ["async_train", *(name for name in MERGED if SCHEDULES[name].eligible)])
def test_old_and_reference_replays_depend_on_the_rollout_alone(schedule):
    graph = graph_of(schedule, old_logprob_source="recompute", reference_replay=True)
    for i in range(8):
        for kind in ("old_replay", "ref_replay"):
            assert needs(graph, f"{kind}:{i}") == {f"generate:{i}": "trajectory"}
            assert ancestors(graph, f"{kind}:{i}") == {f"generate:{i}", f"encode_prompt:{i // 4}"}


@pytest.mark.parametrize("schedule", ["colocated", "async_reward"])
def test_stage_by_stage_old_replays_come_after_the_scores(schedule):
    graph = graph_of(schedule, old_logprob_source="recompute")
    assert "barrier:scored" in needs(graph, "old_replay:0")


def test_reference_replay_is_needed_by_its_own_grad_replay():
    graph = graph_of(reference_replay=True)
    for i in range(8):
        assert f"ref_replay:{i}" in needs(graph, f"grad_replay:{i}")
    assert ids(graph_of(), "ref_replay") == []


# -- mini-batches and updates ------------------------------------------------------------------------


@pytest.mark.parametrize("schedule", REPLAYING)
def test_replays_of_the_next_mini_batch_need_the_update(schedule):
    graph = graph_of(schedule, mini_batches=4)
    for i in range(8):
        m = i // 2
        chain = {t for t in needs(graph, f"grad_replay:{i}") if t.startswith("update")}
        assert chain == ({f"update:{m - 1}"} if m else set())
        if m:
            assert needs(graph, f"grad_replay:{i}")[f"update:{m - 1}"] == "adapter"
    assert {f"update:{m}" for m in range(3)} <= ancestors(graph, "update:3")


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_update_needs_all_folds_of_its_mini_batch(schedule):
    graph = graph_of(schedule)
    assert needs(graph, "update:0").keys() == {f"fold:{i}" for i in range(4)}
    assert needs(graph, "update:1").keys() == {f"fold:{i}" for i in range(4, 8)}


@pytest.mark.parametrize("schedule", [name for name in SCHEDULES if SCHEDULES[name].eligible])
def test_training_waits_for_scores_unless_it_starts_early(schedule):
    graph = graph_of(schedule)
    scores = {t.id for t in graph.tasks if t.kind in ("score", REQUEST)}
    before = ancestors(graph, "grad_replay:0")
    assert scores & before == (set() if schedule in EARLY else scores)
    assert scores <= ancestors(graph, "update:1")


def test_two_gradients_travel_where_the_ratio_may_be_clipped():
    graph = graph_of()
    assert needs(graph, "fold:3")["grad_replay:3"] == "gradient"
    assert needs(graph, "fold:4")["grad_replay:4"] == "sign_gradients"
    late = graph_of("async_reward_merged")
    assert needs(late, "fold:4")["grad_replay:4"] == "gradient"


def test_folds_sit_with_the_update_unless_partial_sums_are_allowed():
    workload, placement = workload_of(**EIGHT), placement_of("merged_replay", actors=3)
    graph, assignment = build(workload, placement)
    assert {assignment.lane_of[f"fold:{i}"] for i in range(8)} == {"actor0"}
    assert needs(graph, "update:0") == dict.fromkeys((f"fold:{i}" for i in range(4)), None)
    graph, assignment = build(workload_of(**EIGHT, deterministic=False), placement)
    assert [assignment.lane_of[f"fold:{i}"] for i in range(8)] == [f"actor{i % 3}" for i in range(8)]
    assert needs(graph, "update:0") == dict.fromkeys((f"fold:{i}" for i in range(4)), "gradient")


# -- advantages --------------------------------------------------------------------------------------


def scored_by(graph, advantage):
    return [int(need.task.split(":")[1]) for need in graph.by_id[advantage].needs]


def test_group_scope_needs_the_scores_of_the_group():
    graph = graph_of(mini_batches=4)
    assert ids(graph, "advantage") == ["advantage:0", "advantage:1"]
    assert scored_by(graph, "advantage:0") == [0, 1, 2, 3]
    assert scored_by(graph, "advantage:1") == [4, 5, 6, 7]
    assert [t for i in range(8) for t in needs(graph, f"fold:{i}") if t.startswith("adv")] == [
        f"advantage:{i // 4}" for i in range(8)
    ]


def test_a_mini_batch_that_splits_a_group_waits_for_the_rest_of_its_scores():
    graph = graph_of(mini_batches=4)
    assert {f"request:{i}" for i in range(4)} <= ancestors(graph, "update:0")
    assert f"request:{4}" not in ancestors(graph, "update:0")


def test_mini_batch_scope_needs_whole_groups_too():
    graph = graph_of(candidates=9, group_size=3, mini_batches=2, advantage_scope="minibatch")
    # mini-batch 0 has candidates 0..4, mini-batch 1 has 5..8; group 1 (3, 4, 5) is in both
    assert scored_by(graph, "advantage:0") == [0, 1, 2, 3, 4, 5]
    assert scored_by(graph, "advantage:1") == [3, 4, 5, 6, 7, 8]
    assert "advantage:0" in needs(graph, "fold:4")
    assert "advantage:1" in needs(graph, "fold:5")


def test_batch_scope_needs_every_score():
    graph = graph_of(advantage_scope="batch")
    assert ids(graph, "advantage") == ["advantage:0"]
    assert scored_by(graph, "advantage:0") == list(range(8))
    assert all("advantage:0" in needs(graph, f"fold:{i}") for i in range(8))


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_a_wider_scope_never_shortens_the_step(schedule):
    profile = profile_of(generate=10, t0=30, grad_replay=5, loss_replay=2)
    steps = [
        simulated(
            workload_of(**EIGHT, advantage_scope=scope),
            placement_of(schedule, scoring="on_arrival"),
            profile,
        )[0].makespan_us
        for scope in ("group", "batch")
    ]
    assert steps[0] <= steps[1]
    if schedule in ("async_train", "merged_replay"):
        assert steps[0] < steps[1]


# -- requests ----------------------------------------------------------------------------------------


def test_all_pairs_compares_every_two_of_a_group():
    graph = graph_of(reward_shape="all_pairs")
    requests = graph.of_kind(REQUEST)
    assert len(requests) == 2 * (4 * 3 // 2)
    assert [t.id for t in requests[:6]] == [f"request:{p}" for p in ("0-1", "0-2", "0-3", "1-2", "1-3", "2-3")]
    assert needs(graph, "request:4-7") == {"vae_decode:4": "frames", "vae_decode:7": "frames"}
    for i in range(8):  # the last video of a group to arrive releases n - 1 requests
        assert sum(f"vae_decode:{i}" in needs(graph, t.id) for t in requests) == 3
    assert len(graph.by_id["advantage:0"].needs) == 6


def test_pointwise_request_needs_one_video():
    graph = graph_of()
    assert [needs(graph, f"request:{i}") for i in range(8)] == [{f"vae_decode:{i}": "frames"} for i in range(8)]


def test_kvpo_rolls_out_one_anchor_per_group():
    graph = graph_of(algorithm="kvpo", reward_shape="anchor", trained_steps=2)
    assert ids(graph, "generate")[:2] == ["generate:anchor0", "generate:anchor1"]
    assert ids(graph, "vae_decode")[:2] == ["vae_decode:anchor0", "vae_decode:anchor1"]
    assert len(ids(graph, "generate")) == len(ids(graph, "vae_decode")) == 10
    assert len(ids(graph, "grad_replay")) == 8
    for i in range(8):
        assert needs(graph, f"request:{i}") == {
            f"vae_decode:{i}": "frames",
            f"vae_decode:anchor{i // 4}": "frames",
        }


def test_other_anchored_judges_compare_with_a_fixed_video():
    graph = graph_of(reward_shape="anchor")
    assert len(ids(graph, "generate")) == 8


def test_kvpo_weights_need_every_branch_of_the_group():
    graph = graph_of(algorithm="kvpo", reward_shape="anchor", trained_steps=2)
    assert needs(graph, "group_weights:1").keys() == {
        "advantage:1",
        *(f"grad_replay:{i}" for i in range(4, 8)),
    }
    for i in range(8):
        assert f"group_weights:{i // 4}" in needs(graph, f"fold:{i}")


@pytest.mark.parametrize(("scope", "advantage"), [("group", 1), ("minibatch", 1), ("batch", 0)])
def test_kvpo_weights_follow_the_advantage_scope(scope, advantage):
    graph = graph_of(algorithm="kvpo", reward_shape="anchor", advantage_scope=scope)
    assert f"advantage:{advantage}" in needs(graph, "group_weights:1")


def test_kvpo_refuses_a_split_group():
    with pytest.raises(InputError, match=r"mini_batches=4 must divide the 2 groups: a KVPO group may not be split"):
        workload_of(**EIGHT | {"mini_batches": 4}, algorithm="kvpo", reward_shape="anchor")


@pytest.mark.parametrize("scoring", ["one_batch", "per_mini_batch"])
def test_batches_cover_every_request_once(scoring):
    for schedule in SCHEDULES:
        graph = graph_of(schedule, {"scoring": scoring, "rewards": 3, "actors": 2})
        members = [name for task in graph.of_kind("score") for name in task.members]
        assert sorted(members, key=int) == [str(i) for i in range(8)]


def test_one_batch_per_reward_gpu_takes_its_own_candidates():
    graph = graph_of(placement={"scoring": "one_batch", "rewards": 3})
    assert {t.id: t.members for t in graph.of_kind("score")} == {
        "score:reward0#0": ("0", "3", "6"),
        "score:reward1#0": ("1", "4", "7"),
        "score:reward2#0": ("2", "5"),
    }


def test_per_mini_batch_scores_each_mini_batch_apart():
    graph = graph_of(placement={"scoring": "per_mini_batch", "rewards": 2})
    assert {t.id: t.members for t in graph.of_kind("score")} == {
        "score:reward0#0": ("0", "2"),
        "score:reward1#0": ("1", "3"),
        "score:reward0#1": ("4", "6"),
        "score:reward1#1": ("5", "7"),
    }


# -- placement ---------------------------------------------------------------------------------------


def test_lanes_are_taken_in_turn():
    _, assignment = build(workload_of(**EIGHT), placement_of("merged_replay", actors=3, rewards=2))
    for kind in ("generate", "vae_decode", "grad_replay"):
        assert [assignment.lane_of[f"{kind}:{i}"] for i in range(8)] == [f"actor{i % 3}" for i in range(8)]
    graph, assignment = build(workload_of(**EIGHT), placement_of("colocated", actors=3, rewards=2))
    assert [lane.name for lane in graph.lanes] == [f"gpu{n}" for n in range(5)]
    assert [assignment.lane_of[f"generate:{i}"] for i in range(8)] == [f"gpu{i % 5}" for i in range(8)]
    assert assignment.lane_of["update:0"] == "gpu0"


def test_the_first_decodes_move():
    _, assignment = build(workload_of(**EIGHT), placement_of("stagebreaker", actors=3, rewards=2, vae_moved=5))
    assert [assignment.lane_of[f"vae_decode:{i}"] for i in range(8)] == [
        "reward0", "reward1", "reward0", "reward1", "reward0", "actor2", "actor0", "actor1",
    ]  # fmt: skip
    assert assignment.order["reward0"][:3] == ("vae_decode:0", "vae_decode:2", "vae_decode:4")


def test_the_last_replays_of_each_mini_batch_move():
    moved = {"train_moved": (1, 3), "ref_moved": (0, 2), "old_moved": (4, 0)}
    _, assignment = build(
        workload_of(**EIGHT, old_logprob_source="recompute", reference_replay=True),
        placement_of("stagebreaker", actors=1, rewards=1, **moved),
    )
    on_reward = {
        kind: [i for i in range(8) if assignment.lane_of[f"{kind}:{i}"] == "reward0"]
        for kind in ("grad_replay", "ref_replay", "old_replay")
    }
    assert on_reward == {
        "grad_replay": [3, 5, 6, 7],
        "ref_replay": [6, 7],
        "old_replay": [0, 1, 2, 3],
    }


@pytest.mark.parametrize("schedule", [s for s in SCHEDULES if s != "stagebreaker"])
def test_counts_move_nothing_in_schedules_without_placement(schedule):
    still = queues(schedule, {})
    assert still == queues(schedule, {"vae_moved": 3, "train_moved": (1, 1)})


def test_a_reward_gpu_decodes_then_scores_then_replays():
    order = queues("stagebreaker", {"vae_moved": 2, "train_moved": (1, 1), "scoring": "one_batch"})
    assert order["reward0"] == (
        "vae_decode:0", "vae_decode:1", "score:reward0#0", "grad_replay:3", "grad_replay:7",
    )  # fmt: skip


def test_old_replays_of_later_mini_batches_fill_the_wait_for_the_update():
    order = queues("merged_replay", {}, old_logprob_source="first_replay")["actor0"]
    assert order[order.index("grad_replay:3") + 1 : order.index("update:0")] == (
        *(f"old_replay:{i}" for i in range(4, 8)),
        *(f"fold:{i}" for i in range(4)),
    )


@pytest.mark.parametrize(
    ("placement", "message"),
    [
        ({"vae_moved": 9}, r"vae_moved=9 must be in 0\.\.8 \(batch of 8 candidates\)"),
        ({"train_moved": (1,)}, r"train_moved=\[1\] must have one entry per mini-batch \(mini_batches=2\)"),
        ({"train_moved": (0, 5)}, r"train_moved\[1\]=5 must be in 0\.\.4"),
        ({"vae_moved": 1, "rewards": 0}, "rewards=0; give the plan a reward GPU"),
        ({"rewards": 0}, "schedule stagebreaker needs a reward GPU, but rewards=0"),
    ],
)
def test_counts_out_of_range_are_refused(placement, message):
    with pytest.raises(InputError, match=message):
        build(workload_of(**EIGHT), placement_of("stagebreaker", **placement))


# -- splitting a candidate by step -------------------------------------------------------------------


def split_of(candidate=3, steps=((0, 1), (2,)), lanes=("actor0", "reward0")):
    return Split(candidate=candidate, steps=steps, lanes=lanes)


def test_parts_of_a_split_replay():
    graph, assignment = build(workload_of(**EIGHT), placement_of("stagebreaker", splits=(split_of(),)))
    parts = [t for t in graph.of_kind("grad_replay") if t.candidate == 3]
    assert [(t.id, t.steps) for t in parts] == [("grad_replay:3.k0-1", (0, 1)), ("grad_replay:3.k2", (2,))]
    assert [assignment.lane_of[t.id] for t in parts] == ["actor0", "reward0"]
    assert needs(graph, "fold:3").keys() == {"grad_replay:3.k0-1", "grad_replay:3.k2", "advantage:0"}
    whole = build(workload_of(**EIGHT), placement_of("stagebreaker"))[0].by_id["grad_replay:3"]
    assert all(t.needs == whole.needs for t in parts)


def test_split_replay_takes_the_rebuild_and_its_share_on_each_lane():
    profile = profile_of(generate=10, grad_replay=16, context_rebuild=1)
    workload = workload_of()
    placement = placement_of("stagebreaker", scoring="one_batch", splits=(split_of(1),))
    timeline, _ = simulated(workload, placement, profile)
    spans = {r.task: (r.start_us / SECOND, r.end_us / SECOND) for r in timeline.rows if r.kind == "grad_replay"}
    assert spans == {"grad_replay:0": (20, 36), "grad_replay:1.k0-1": (36, 47), "grad_replay:1.k2": (20, 26)}
    assert timeline.makespan_us == 47 * SECOND


@pytest.mark.parametrize(
    ("split", "message"),
    [
        (split_of(8), r"candidate 8 must be in 0\.\.7"),
        (split_of(steps=((0,), (2,))), r"cover steps \[0, 2\]"),
        (split_of(steps=((0, 1), (1, 2))), r"cover steps \[0, 1, 1, 2\]"),
        (split_of(lanes=("actor0",)), "on 1 lanes"),
        (split_of(steps=((0, 1, 2), ())), "splits: .*3"),
        (split_of(lanes=("actor0", "reward7")), "reward7"),
    ],
)
def test_bad_splits_are_refused(split, message):
    with pytest.raises(InputError, match=message):
        build(workload_of(**EIGHT), placement_of("stagebreaker", splits=(split,)))


def test_weights_of_a_kvpo_group_need_all_parts_of_a_split_branch():
    workload = workload_of(**EIGHT, algorithm="kvpo", reward_shape="anchor")
    graph, _ = build(workload, placement_of("stagebreaker", splits=(split_of(),)))
    assert {"grad_replay:3.k0-1", "grad_replay:3.k2"} <= needs(graph, "group_weights:0").keys()


# -- the published ratios ----------------------------------------------------------------------------


@pytest.fixture(scope="module")
def published():
    """Timelines and graphs of all schedules: provisional profile, 24 candidates, 4 + 2 GPUs."""
    text = (resources.files("stagebreaker.profiles.data") / "provisional-dancegrpo-vrt.json").read_text("utf-8")
    profile = Profile.model_validate_json(text)
    found = {}
    for schedule in SCHEDULES:
        old = "recompute" if schedule in ("colocated", "async_reward") else "rollout"
        workload = load_workload("dancegrpo-vrt", ("candidates=24", "group_size=12", f"old_logprob_source={old}"))
        where = {"scoring": "on_arrival"}
        if schedule == "stagebreaker":
            where = {"scoring": "one_batch", "vae_moved": 20, "train_moved": (0, 4)}
        found[schedule] = simulated(workload, placement_of(schedule, actors=4, rewards=2, **where), profile)
    return found


@pytest.mark.parametrize(
    ("schedule", "base", "speedup"),
    [
        ("async_reward", "colocated", 0.774),
        ("async_train", "async_reward", 1 / (1 - 0.222)),
        ("merged_replay", "colocated", 1.113),
        ("stagebreaker", "colocated", 1.385),
        ("stagebreaker", "async_reward", 1.789),
        ("stagebreaker", "colocated_merged", 1.18),
    ],
)
def test_published_speedups_follow_from_the_provisional_costs(published, schedule, base, speedup):
    steps = {name: timeline.makespan_us for name, (timeline, _) in published.items()}
    assert steps[base] / steps[schedule] == pytest.approx(speedup, rel=0.01)


def test_published_waits_follow_from_the_provisional_costs(published):
    timeline, graph = published["async_reward"]
    actor = timeline.use(graph)[0]
    assert actor.idle_us["wait:reward"] / timeline.makespan_us == pytest.approx(0.132, rel=0.01)
    assert timeline.utilisation("reward", graph) == pytest.approx(0.379, rel=0.01)
    ours, graph = published["stagebreaker"]
    assert ours.utilisation("reward", graph) == pytest.approx(0.81, rel=0.01)


def test_scale_of_the_provisional_costs(published):
    assert published["async_reward"][0].makespan_us == pytest.approx(7_500_000 / 0.0343, rel=0.02)
