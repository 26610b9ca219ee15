"""Algorithms and schedules beyond the paper's: steps worked out by hand on one actor and one reward GPU.

Seconds. A serial judge takes t1 per video; decodes, folds and links cost nothing unless a test says so.
"""

from collections import Counter

import pytest
from builders import SECOND, ancestors, needs, placement_of, profile_of, simulated, span_s, step_s, workload_of

from stagebreaker.profiles.document import InputError
from stagebreaker.sim.dispatch import data_bytes
from stagebreaker.sim.engine import profiled_us
from stagebreaker.sim.plan import Split
from stagebreaker.sim.schedules import SCHEDULES, build, why_not

COSTS = {"generate": 10, "loss_replay": 8, "grad_replay": 20}
TWO_BATCHES = {"candidates": 4, "group_size": 2, "mini_batches": 2}
KL = {"algorithm": "flow_grpo", "reference_replay": True, "kl_beta": 0.04}
SECOND_OF_LINK = 10_000_000_000
"""Bytes that the link of ``profile_of`` carries in 1 s."""


def seconds(schedule, workload, profile, actors=1, **placement):
    where = {"scoring": "on_arrival"} | placement
    return step_s(workload, placement_of(schedule, actors, **where), profile)


def graph_of(schedule, **fields):
    return build(workload_of(**fields), placement_of(schedule, scoring="on_arrival"))[0]


# -- Flow-GRPO with a KL -------------------------------------------------------------------------------


def test_a_kl_to_means_costs_a_second_backward_unless_the_advantage_is_known():
    """A backward is 20 - 8 = 12. Rollout ends at 20, reference passes at 28; then

    early: two replays of 20 + 12 end at 92; after the last score (25) with one seed: two of 20 end at 68.
    With 60 a verdict the scores end at 130: early training is over by then, late training ends at 170.
    """
    workload = workload_of(**KL)
    quick, slow = (profile_of(**COSTS, ref_replay=4, t1=t1) for t1 in (5, 60))
    assert (seconds("merged_replay", workload, quick), seconds("async_reward_merged", workload, quick)) == (92, 68)
    assert (seconds("merged_replay", workload, slow), seconds("async_reward_merged", workload, slow)) == (130, 170)
    measured = profile_of(**COSTS, ref_replay=4, t1=5, grad_replay_kl=25)
    assert seconds("merged_replay", workload, measured) == 78


def test_without_a_kl_the_reference_costs_its_pass_alone():
    workload = workload_of(**KL | {"kl_beta": 0})
    assert seconds("merged_replay", workload, profile_of(**COSTS, ref_replay=4, t1=5)) == 68
    assert needs(graph_of("merged_replay", **KL | {"kl_beta": 0}), "grad_replay:0")["ref_replay:0"] is None


def test_reference_means_and_the_kl_part_travel():
    """Both videos are there at 20, scored by 30. Reference means take 1 s on the link, a gradient 1 s.

    Reference passes on the reward GPU (30 to 34 to 38) reach the actor at 35 and 39: replays 35 to 67 to 99.
    Candidate 1 there for good (30 to 34 to 66): g and the KL part arrive at 68, behind candidate 0 (20 to 24 to 56).
    """
    workload = workload_of(**KL)
    sizes = {"reference": SECOND_OF_LINK, "gradient": SECOND_OF_LINK}
    profile = profile_of(**COSTS, ref_replay=4, t1=5, sizes_bytes=sizes)
    assert seconds("stagebreaker", workload, profile, scoring="one_batch", ref_moved=(2,)) == 99
    moved = {"ref_moved": (1,), "train_moved": (1,)}
    assert seconds("stagebreaker", workload, profile, scoring="one_batch", **moved) == 68


@pytest.mark.parametrize(
    ("schedule", "fields", "vectors"),
    [
        ("merged_replay", KL, (2, 3)),
        ("async_train", KL, (2, 3)),
        ("stagebreaker", KL | {"kl_beta": 0}, (1, 2)),
        ("async_reward_merged", KL, (1, 1)),
        ("colocated", KL, (1, 1)),
        ("one_step_off", KL, (1, 1)),
        (
            "merged_replay",
            KL | {"algorithm": "kvpo", "reward_shape": "anchor"},
            (1, 1),
        ),
    ],
)
def test_what_a_candidate_keeps_until_its_fold(schedule, fields, vectors):
    """In mini-batches 1 and 2: g is one vector while nothing is clipped, then g+ and g-; the KL part is one more."""
    graph = graph_of(schedule, **TWO_BATCHES | fields)
    profile = profile_of(sizes_bytes={"gradient": 7})
    kept = [data_bytes(profile, needs(graph, f"fold:{i}")[f"grad_replay:{i}"]) for i in (0, 2)]
    assert kept == [7 * n for n in vectors]


def test_a_kl_of_log_probabilities_needs_no_means():
    graph = graph_of("merged_replay", **KL | {"algorithm": "kvpo", "reward_shape": "anchor"})
    assert needs(graph, "grad_replay:0")["ref_replay:0"] is None
    assert needs(graph_of("merged_replay", **KL), "grad_replay:0")["ref_replay:0"] == "reference"


def test_a_profile_without_reference_sizes_serves_all_who_need_none():
    profile = profile_of(**COSTS, ref_replay=4)
    sizes = {kind: size for kind, size in profile.sizes_bytes.items() if kind != "reference"}
    old = profile.model_copy(update={"sizes_bytes": sizes})
    assert seconds("merged_replay", workload_of(**KL | {"kl_beta": 0}), old) == 68
    with pytest.raises(InputError, match=r"profile 'round' has no sizes_bytes\.reference; it has .*; add it"):
        seconds("merged_replay", workload_of(**KL), old)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"kl_beta": 0.1}, "kl_beta=0.1 must be 0 with algorithm='dancegrpo'"),
        ({"kl_beta": 0.1, "algorithm": "flow_grpo"}, "kl_beta=0.1 needs the reference; set reference_replay: true"),
        ({"kl_beta": -1}, "kl_beta"),
        ({"train_per_group": 3}, "train_per_group=3 must be in 1..2 (group_size=2)"),
        ({"train_per_group": 0}, "train_per_group"),
        ({"train_per_group": 1, "mini_batches": 2}, "mini_batches=2 must divide the 1 groups with train_per_group"),
        (
            {"train_per_group": 1, "algorithm": "kvpo", "reward_shape": "anchor"},
            "train_per_group=1 must be 2 with algorithm='kvpo'",
        ),
    ],
)
def test_what_cannot_be_is_refused_in_one_line(fields, message):
    with pytest.raises(InputError) as error:
        workload_of(**fields)
    assert message in str(error.value)
    assert "\n" not in str(error.value)


# -- selection after rewards ---------------------------------------------------------------------------

BEST_OF_FOUR = {"candidates": 4, "group_size": 4, "train_per_group": 1}


def test_best_of_n_wastes_what_was_replayed_early():
    """Four rollouts of 10 end at 40, the last score at 45. Early: all four replays, 40 to 120, whoever is selected.

    After the scores: the one that is selected, 45 to 65. Without selection it is 120 against 45 + 80.
    """
    profile = profile_of(**COSTS, t1=5)
    chosen, all_four = workload_of(**BEST_OF_FOUR), workload_of(**BEST_OF_FOUR | {"train_per_group": 4})
    for seed in range(4):
        assert seconds("merged_replay", chosen.with_(seed=seed), profile) == 120
    assert (seconds("async_reward_merged", chosen, profile), seconds("async_reward_merged", all_four, profile)) == (
        65,
        125,
    )
    assert seconds("merged_replay", all_four, profile) == 120
    assert seconds("async_train", chosen, profile) == 40 + 4 * 8 + 4 * 20


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_every_schedule_trains_the_same_candidates(schedule):
    fields = {"candidates": 8, "group_size": 4, "mini_batches": 2, "train_per_group": 2, "seed": 3}
    workload, graph = workload_of(**fields), graph_of(schedule, **fields)
    for m in range(2):
        trained = workload.trained_members(m)
        assert len(trained) == 2
        assert {workload.mini_batch_of(i) for i in trained} == {m}
        assert [t for t in needs(graph, f"update:{m}") if t.startswith("fold")] == [f"fold:{i}" for i in trained]
        replayed = [t.candidate for t in graph.of_kind("grad_replay") if t.mini_batch == m]
        early = SCHEDULES[schedule].early
        wanted = list(workload.mini_batch_members(m)) if early else list(trained)
        assert replayed == ([] if schedule == "lean" and m == 0 else wanted)


def test_nobody_knows_who_is_selected_before_the_scores():
    fields = BEST_OF_FOUR | {"old_logprob_source": "recompute"}
    late, early = graph_of("async_reward_merged", **fields), graph_of("merged_replay", **fields)
    (chosen,) = workload_of(**BEST_OF_FOUR).trained_members(0)
    assert [t.id for t in late.of_kind("old_replay")] == [f"old_replay:{chosen}"]
    assert "barrier:scored" in needs(late, f"old_replay:{chosen}")
    assert [t.id for t in early.of_kind("old_replay")] == [f"old_replay:{i}" for i in range(4)]
    assert {f"request:{i}" for i in range(4)} <= ancestors(early, f"fold:{chosen}")


def test_selection_is_a_fair_draw_by_seed_and_group():
    found = Counter()
    for seed in range(400):
        workload = workload_of(candidates=8, group_size=4, train_per_group=1, seed=seed)
        found.update(workload.trained_members(0))
        assert workload.trained_members(0) == workload.with_(name="other").trained_members(0)
    assert set(found) == set(range(8))
    assert all(60 <= count <= 140 for count in found.values())  # 100 each, give or take 4.6 deviations


@pytest.mark.parametrize("schedule", ["async_reward_merged", "async_reward", "colocated_merged"])
def test_the_selected_are_dealt_evenly_after_the_scores(schedule):
    """Whoever is selected, three GPUs get one replay each: nobody would leave two to one of them."""
    for seed in range(5):
        workload = workload_of(candidates=9, group_size=9, train_per_group=3, seed=seed)
        actors, rewards = (2, 1) if schedule == "colocated_merged" else (3, 1)
        graph, assignment = build(workload, placement_of(schedule, actors, rewards, scoring="on_arrival"))
        lanes = [assignment.lane_of[t.id] for t in graph.of_kind("grad_replay")]
        assert len(set(lanes)) == len(lanes) == 3


# -- lean ----------------------------------------------------------------------------------------------


def test_lean_trains_while_it_rolls_out():
    """generate and a backward of 12: two rollouts end at 44, the last score at 49, and nothing is left but the update.

    merged_replay: rollouts end at 20, replays at 60. With two mini-batches only the first is lean: 2 x 22 + 2 x 10 for
    the rollouts, then two replays of 20.
    """
    profile = profile_of(**COSTS, t1=5, update=1)
    assert profiled_us(profile, "generate_train", "gpu") == 22 * SECOND
    assert (seconds("lean", workload_of(), profile), seconds("merged_replay", workload_of(), profile)) == (50, 61)
    assert seconds("lean", workload_of(**TWO_BATCHES), profile) == 64 + 1 + 40 + 1
    measured = profile_of(**COSTS, t1=5, update=1, generate_train=15)
    assert seconds("lean", workload_of(), measured) == 36


def test_lean_folds_what_the_rollout_left():
    graph = graph_of("lean", **TWO_BATCHES, old_logprob_source="first_replay")
    assert [t.id for t in graph.of_kind("grad_replay")] == ["grad_replay:2", "grad_replay:3"]
    assert [t.id for t in graph.of_kind("old_replay")] == ["old_replay:2", "old_replay:3"]
    assert [t.cost_kind for t in graph.of_kind("generate")] == ["generate_train"] * 2 + [None] * 2
    assert needs(graph, "fold:0") == {"generate:0": "gradient", "advantage:0": None}
    assert needs(graph, "fold:2")["grad_replay:2"] == "sign_gradients"


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"old_logprob_source": "recompute"}, "must be 'rollout' or 'first_replay'"),
        ({"reference_replay": True}, "reference_replay=true comes too late"),
        ({"algorithm": "kvpo", "reward_shape": "anchor"}, "trains other forward passes than it rolls out"),
    ],
)
def test_where_lean_would_not_be_exact_it_is_refused(fields, message):
    workload = workload_of(**fields)
    with pytest.raises(InputError, match="schedule lean back-propagates mini-batch 1 during rollout") as error:
        build(workload, placement_of("lean"))
    assert message in str(error.value)
    assert [name for name in SCHEDULES if why_not(name, workload)] == ["lean"]


def test_a_candidate_without_a_replay_cannot_be_split():
    split = Split(candidate=0, steps=((0,), (1, 2)), lanes=("actor0", "reward0"))
    with pytest.raises(InputError, match="candidate 0 has no grad_replay under lean"):
        build(workload_of(), placement_of("lean", splits=(split,)))


# -- one step off --------------------------------------------------------------------------------------


def test_one_step_off_trains_while_the_next_batch_is_scored():
    """The next batch rolls out until 20; this one trains, 20 to 60, and updates, 3. Scores of 5 end at 25, of 30 at 70.

    On policy the update waits for the last score: 63 and 73.
    """
    workload = workload_of()
    quick, slow = (profile_of(**COSTS, update=3, t1=t1) for t1 in (5, 30))
    assert (seconds("one_step_off", workload, quick), seconds("one_step_off", workload, slow)) == (63, 70)
    assert (seconds("merged_replay", workload, quick), seconds("merged_replay", workload, slow)) == (63, 73)


def test_one_step_off_ends_with_the_sync():
    """Two actors: rollout to 10, replays to 30, update to 33; the other actor has the adapter 1 s later."""
    profile = profile_of(**COSTS, update=3, t1=1, sizes_bytes={"adapter": SECOND_OF_LINK})
    timeline, _ = simulated(workload_of(), placement_of("one_step_off", 2, scoring="on_arrival"), profile)
    assert span_s(timeline, "grad_replay:1") == (10, 30)
    assert timeline.makespan_us == 34 * SECOND


@pytest.mark.parametrize("fields", [{}, KL, {"algorithm": "kvpo", "reward_shape": "anchor"}])
def test_one_step_off_has_no_edge_from_the_next_batch_to_training(fields):
    graph = graph_of("one_step_off", **TWO_BATCHES | fields)
    before = {graph.by_id[task].kind for task in ancestors(graph, "update:1")}
    assert before <= {"ref_replay", "grad_replay", "fold", "update", "group_weights"}
    assert {"generate", "request"} <= {task.kind for task in graph.tasks}


# -- KVPO ----------------------------------------------------------------------------------------------


def test_kvpo_step_by_hand():
    """Anchor, two branches: rollouts end at 10, 20, 30; old and initial-policy passes (3 + 4 each) at 44; replays 84.

    Branch 0 is compared with the anchor from 20 on, branch 1 from 30 on: quick verdicts hide, those of 40 end at 100.
    """
    workload = workload_of(
        algorithm="kvpo",
        reward_shape="anchor",
        reference_replay=True,
        kl_beta=10,
        old_logprob_source="recompute",
    )
    for t1, step in ((5, 84), (40, 100)):
        profile = profile_of(**COSTS, old_replay=3, ref_replay=4, t1=t1, update=1)
        timeline, graph = simulated(workload, placement_of("merged_replay", scoring="on_arrival"), profile)
        assert span_s(timeline, "request:0") == (20, 20 + t1)
        assert span_s(timeline, "grad_replay:0") == (44, 64)
        assert timeline.makespan_us == (step + 1) * SECOND
    weights = {"advantage:0", "grad_replay:0", "grad_replay:1"}
    assert needs(graph, "group_weights:0").keys() == weights
    assert [needs(graph, f"fold:{i}") for i in range(2)] == [
        {f"grad_replay:{i}": "gradient", "group_weights:0": None} for i in range(2)
    ]


# -- rewards that do not come --------------------------------------------------------------------------


FAILED = {"candidates": 8, "group_size": 4, "mini_batches": 1, "failed_rewards": (1, 6)}


@pytest.mark.parametrize(
    ("policy", "fields", "trained"),
    [
        ("mask_candidate", {}, (0, 2, 3, 4, 5, 7)),
        ("drop_group", {"failed_rewards": (6,)}, (0, 1, 2, 3)),
        ("mask_candidate", {"failed_rewards": (0, 1, 2)}, (4, 5, 6, 7)),  # one is left of its group: no spread
        ("mask_candidate", {"mini_batches": 4, "failed_rewards": (1,)}, (0, 2, 3, 4, 5, 6, 7)),
    ],
)
def test_who_is_trained_without_some_rewards(policy, fields, trained):
    """Schedules that wait replay the others alone; early ones have replayed all, and fold only the others."""
    fields = FAILED | {"on_unscorable": policy} | fields
    for schedule in ("colocated_merged", "stagebreaker"):
        graph = graph_of(schedule, **fields)
        assert tuple(task.candidate for task in graph.of_kind("fold")) == trained
        replayed = tuple(task.candidate for task in graph.of_kind("grad_replay"))
        assert replayed == (trained if schedule == "colocated_merged" else tuple(range(8)))


def test_a_lost_reward_costs_early_training_its_replay():
    """One GPU rolls out and trains (10 and 20 s each), scores take 5: early 80 + 160 with or without, late 20 less."""
    profile = profile_of(**COSTS, t1=5)
    whole = workload_of(candidates=8, group_size=4, on_unscorable="mask_candidate")
    lost = whole.with_(failed_rewards=(7,))
    assert seconds("merged_replay", whole, profile) == seconds("merged_replay", lost, profile) == 80 + 160
    assert seconds("async_reward_merged", whole, profile) - seconds("async_reward_merged", lost, profile) == 20


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        (
            {},
            "failed_rewards=[1, 6] with on_unscorable='fail' leaves no step to look at; set on_unscorable",
        ),
        ({"failed_rewards": (8,), "on_unscorable": "drop_group"}, "must name candidates of 0..7, each once"),
        ({"failed_rewards": (1, 1), "on_unscorable": "drop_group"}, "must name candidates of 0..7, each once"),
        ({"on_unscorable": "drop_group"}, "leave nobody of mini-batch 0 to train; name fewer"),
        (
            {"on_unscorable": "mask_candidate", "algorithm": "kvpo", "reward_shape": "anchor"},
            "set on_unscorable to drop_group",
        ),
    ],
)
def test_failed_rewards_that_leave_no_step_are_refused(fields, message):
    with pytest.raises(InputError) as error:
        workload_of(**FAILED | fields)
    assert message in str(error.value)
