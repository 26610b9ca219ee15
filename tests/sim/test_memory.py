"""Memory: budgets by hand, gradients that are held until their fold, and what timelines hold at any time."""

import pytest
from builders import placement_of, profile_of, simulated, workload_of
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from strategies import placements, profiles, workloads

from stagebreaker.profiles.document import InputError
from stagebreaker.profiles.models import FP32, WAN_1_3B, Lora
from stagebreaker.profiles.table import MEMORY_KINDS, JudgeTurn, Verdicts
from stagebreaker.sim.memory import Memory, budgets, gigabytes
from stagebreaker.sim.plan import Split
from stagebreaker.sim.schedules import build
from stagebreaker.sim.workload import Cluster

MEGA = 1_000_000
VECTOR = 1_400 * MEGA
MEMORY = {
    "policy_weights": 2_840 * MEGA,
    "adapter": VECTOR,
    "kv_cache": 3_450 * MEGA,
    "gradient_buffer": VECTOR,
    "optimizer": 2 * VECTOR,
    "vae_weights": 250 * MEGA,
    "text_encoder_weights": 0,
    "judge_weights": 16_500 * MEGA,
    "judge_reserve": 500 * MEGA,
    "encode_prompt_activations": 0,
    "generate_activations": 400 * MEGA,
    "replay_activations": 400 * MEGA,
    "grad_replay_activations": 1_000 * MEGA,
    "vae_decode_activations": 1_300 * MEGA,
    "score_activations": 1_200 * MEGA,
}
"""LoRA of rank 256 on all linears of Wan-1.3B with checkpointing, the text encoder on the CPU, a judge of 8 B."""
SIZES = {"trajectory": 20 * MEGA, "latents": 4 * MEGA, "frames": 100 * MEGA}
CARD = 24_000 * MEGA
PROFILE = profile_of("continuous", t0=5, t1=1, generate=10, vae_decode=3, grad_replay=20, update=1, sizes_bytes=SIZES)
PROFILE = PROFILE.model_copy(update={"memory_bytes": MEMORY})
ARRIVAL = {"scoring": "on_arrival"}


def held(workload, placement, profile=PROFILE, memory_bytes=CARD):
    """lane -> budget."""
    graph, assignment = build(workload, placement)
    cluster = Cluster.equal(len(graph.lanes), profile.gpu_kinds[0].name, memory_bytes)
    return {b.lane: b for b in budgets(workload, graph, assignment, profile, cluster)}


def megabytes(budget):
    return {line.name: line.size_bytes // MEGA for line in budget.lines}


def vectors(found, name="gradient buffers"):
    """lane -> vectors of this line, where there are any."""
    lines = {lane: [line.size_bytes // VECTOR for line in b.lines if line.name == name] for lane, b in found.items()}
    return {lane: sizes[0] for lane, sizes in lines.items() if sizes}


def test_the_vector_is_that_of_rank_256_on_all_linears():
    assert FP32 * Lora(256, ("all-linear",)).parameters(WAN_1_3B) == pytest.approx(VECTOR, rel=1e-3)
    assert set(MEMORY) == set(MEMORY_KINDS)


# -- by hand ---------------------------------------------------------------------------------------------

FOUR = workload_of(candidates=4, group_size=2, mini_batches=2)


def test_an_actor_that_updates_line_by_line():
    """Candidates 0 and 2 here, 1 and 3 on the other actor; the mini-batches are {0, 1} and {2, 3}.

    Most is held while candidate 2 is replayed: its g+ and g-, those of candidate 3 that may have come, three units;
    the adapter in the policy, as it was initialised, at the start of the step and after the first update.
    """
    found = held(FOUR, placement_of("merged_replay", 2, 1, **ARRIVAL))
    assert megabytes(found["actor0"]) == {
        "policy": 2_840,
        "KV cache": 3_450,
        "VAE": 250,
        "gradient buffers": 2 * 1_400,
        "received gradients": 2 * 1_400,
        "unit buffers": 3 * 1_400,
        "adapter": 4 * 1_400,
        "optimizer": 2_800 + 1_400,
        "stored": 2 * (20 + 4 + 100),
        "activations": 1_300,
    }
    assert found["actor0"].total_bytes == 27_688 * MEGA
    assert not found["actor0"].fits
    assert found["actor0"].over_bytes == 3_688 * MEGA
    # The other keeps both of its candidates until the step ends, since a worker does not drop what it has sent.
    assert megabytes(found["actor1"]) == {
        "policy": 2_840,
        "KV cache": 3_450,
        "VAE": 250,
        "gradient buffers": 4 * 1_400,
        "unit buffers": 3 * 1_400,
        "adapter": 4 * 1_400,
        "stored": 2 * (20 + 4 + 100),
        "activations": 1_300,
    }
    assert found["actor1"].total_bytes == 23_488 * MEGA
    assert found["actor1"].fits
    assert found["actor1"].over_bytes == -512 * MEGA
    assert megabytes(found["reward0"]) == {
        "judge": 16_500,
        "judge reserve": 4 * 500,
        "stored": 4 * 100,
        "activations": 1_200,
    }


def test_at_half_the_rank_the_actor_fits_into_24_gb():
    """14 vectors and adapters and the moments, two more, are half as large: 27,688 - 16 x 700."""
    half = MEMORY | {name: MEMORY[name] // 2 for name in ("adapter", "gradient_buffer", "optimizer")}
    found = held(
        FOUR, placement_of("merged_replay", 2, 1, **ARRIVAL), PROFILE.model_copy(update={"memory_bytes": half})
    )
    assert found["actor0"].total_bytes == (27_688 - 14 * 700) * MEGA
    assert found["actor0"].fits


def test_a_reward_gpu_that_trains_holds_judge_and_policy_and_fits_no_longer():
    found = held(FOUR, placement_of("stagebreaker", 2, 1, **ARRIVAL, vae_moved=1, train_moved=(0, 1)))["reward0"]
    # its judge has given all scores before it trains, but the merged kernel keeps g+ and g- all the same
    assert megabytes(found) == {
        "policy": 2_840,
        "KV cache": 3_450,
        "VAE": 250,
        "gradient buffers": 2_800,
        "unit buffers": 4_200,
        "judge": 16_500,
        "judge reserve": 2_000,
        "adapter": 5_600,
        "stored": 4 * 100 + 4 + 20,
        "activations": 1_300,
    }
    assert not found.fits
    assert found.short(3) == "reward0 needs 39.36 GB of 24.00 GB: judge 16.50 GB, adapter 5.60 GB, unit buffers 4.20 GB"


def test_one_mini_batch_keeps_twice_the_gradients():
    """Two candidates more, four vectors, and one version of the adapter less than with two updates."""
    found = held(workload_of(candidates=4, group_size=2), placement_of("merged_replay", 2, 1, **ARRIVAL))["actor0"]
    assert found.total_bytes == (27_688 + 2 * 2_800 - 1_400) * MEGA
    why = {line.name: line.why for line in found.lines}
    assert why["gradient buffers"] == "of replays here up to mini-batch 0: 4 until they are folded here"
    assert why["received gradients"] == "4 vectors of mini-batch 0 from other GPUs, until they are added"


def test_engines_that_switch_are_not_there_together():
    """Candidates 0 and 3 on gpu0, 1 on gpu1, 2 on gpu2."""
    found = held(FOUR, placement_of("colocated_merged", 2, 1, **ARRIVAL))
    assert {lane: budget.phase for lane, budget in found.items()} == dict.fromkeys(found, "judge")
    # Two requests. The adapter in the policy leaves, the others and the moments stay. gpu1 may be back at training
    # before the judge has left here, and send candidate 1; candidate 2 of gpu2 needs the update, which is made here.
    assert megabytes(found["gpu0"]) == {
        "judge": 16_500,
        "judge reserve": 2 * 500,
        "received gradients": 2 * 1_400,
        "adapter": 2 * 1_400,
        "optimizer": 2_800 + 1_400,
        "stored": 2 * (20 + 4 + 100),
        "activations": 1_200,
    }
    small = PROFILE.model_copy(update={"memory_bytes": MEMORY | {"judge_weights": 0}})
    policy = held(FOUR, placement_of("colocated_merged", 2, 1, **ARRIVAL), small)["gpu0"]
    assert policy.phase == "policy"
    assert policy.total_bytes == 27_688 * MEGA  # as the actor: one candidate of each mini-batch, one sent by others
    assert "judge reserve" not in megabytes(policy)
    # The others update nothing. gpu2 has no part in the first update, which may come while its judge is there.
    assert {lane: megabytes(found[lane])["adapter"] // 1_400 for lane in ("gpu1", "gpu2")} == {"gpu1": 2, "gpu2": 3}
    # With a loss replay of its own, nobody gets to a gradient before it is back.
    seeded = held(FOUR, placement_of("colocated", 2, 1, **ARRIVAL))["gpu0"]
    assert seeded.phase == "judge"
    assert "received gradients" not in megabytes(seeded)


def test_the_example_of_twelve_candidates():
    """Three candidates on the busiest of four actors keep 8.4 GB; all twelve on one GPU 33.6 GB."""
    twelve = workload_of(candidates=12, group_size=6, mini_batches=2)
    found = held(twelve, placement_of("merged_replay", 4, 2, **ARRIVAL))
    # mini-batch {6..11}: 8 is actor0's, the others come; two of the first mini-batch and one, or one and two, elsewhere
    assert vectors(found) == {"actor0": 2, "actor1": 6, "actor2": 6, "actor3": 6}
    assert vectors(found, "received gradients") == {"actor0": 10}
    alone = vectors(held(workload_of(candidates=12, group_size=12), placement_of("merged_replay", 1, 1, **ARRIVAL)))
    assert alone == {"actor0": 24}
    assert alone["actor0"] * VECTOR == 33_600 * MEGA


def test_requests_at_once():
    def reserved(placement, serving="continuous", **fields):
        profile = PROFILE.model_copy(update={"serving": serving})
        found = held(workload_of(candidates=6, group_size=3, mini_batches=2, **fields), placement, profile)
        return {lane: megabytes(b)["judge reserve"] // 500 for lane, b in found.items() if lane.startswith("reward")}

    served, gathered = placement_of("merged_replay", 1, 2, **ARRIVAL), placement_of("merged_replay", 1, 2)
    assert reserved(served) == reserved(gathered) == {"reward0": 3, "reward1": 3}
    assert reserved(served, "serial") == {"reward0": 1, "reward1": 1}
    assert reserved(gathered, "serial") == {"reward0": 3, "reward1": 3}  # one batch is one batch
    assert reserved(placement_of("merged_replay", 1, 2, scoring="per_mini_batch")) == {"reward0": 2, "reward1": 2}
    assert reserved(served, reward_shape="all_pairs") == {"reward0": 3, "reward1": 3}


@pytest.mark.parametrize(("most", "expected"), [(1, 1), (2, 2), (5, 3), (None, 3)])
@pytest.mark.parametrize("scoring", ["on_arrival", "one_batch"])
def test_a_judge_has_room_for_so_many_requests_and_the_others_wait(scoring, most, expected):
    verdicts = Verdicts(turns=(JudgeTurn(prompt_tokens=1),), tokens_per_turn=1, most_active=most)
    profile = PROFILE.model_copy(update={"verdicts": verdicts})
    placement = placement_of("merged_replay", 1, 2, scoring=scoring)
    found = held(workload_of(candidates=6, group_size=3), placement, profile)
    assert {megabytes(found[lane])["judge reserve"] // 500 for lane in ("reward0", "reward1")} == {expected}


# -- which gradients are held ----------------------------------------------------------------------------


def test_a_gradient_with_its_advantage_is_held_until_its_fold_too():
    """All replays of a mini-batch stand in the queue before its first fold."""
    twelve = held(workload_of(candidates=12, group_size=12), placement_of("async_reward", 1, 1, **ARRIVAL))
    assert vectors(twelve) == {"actor0": 12}
    assert vectors(twelve, "accumulator") == {"actor0": 1}
    assert vectors(twelve, "unit buffers") == {}  # a known seed needs no unit of its own
    assert vectors(twelve, "adapter") == {"actor0": 3}
    both = held(workload_of(candidates=24, group_size=12), placement_of("colocated", 1, 1))
    assert vectors(both) == {"gpu0": 12, "gpu1": 12}
    assert vectors(both, "received gradients") == {"gpu0": 12}


@pytest.mark.parametrize("schedule", ["colocated_merged", "async_reward_merged"])
def test_the_merged_kernel_keeps_both_signs_though_the_scores_are_there(schedule):
    found = held(workload_of(candidates=12, group_size=12), placement_of(schedule, 1, 1, **ARRIVAL))
    alone = schedule == "async_reward_merged"
    assert vectors(found) == ({"actor0": 24} if alone else {"gpu0": 12, "gpu1": 12})
    assert vectors(found, "received gradients") == ({} if alone else {"gpu0": 12})
    assert set(vectors(found, "unit buffers").values()) == {3}


def of_six(placement=None, **fields):
    """Vectors per lane of six candidates on two actors: mini-batches {0, 1, 2} and {3, 4, 5}.

    On actor0, which updates, only those of one mini-batch: of the second, 4, where as many come as in the first with
    one version of the adapter more. On actor1 1, 3 and 5, until the step ends.
    """
    fields = {"candidates": 6, "group_size": 3, "mini_batches": 2} | fields
    found = held(workload_of(**fields), placement or placement_of("merged_replay", 2, 2, **ARRIVAL))
    return vectors(found)


def test_what_one_gradient_is():
    assert of_six() == {"actor0": 2, "actor1": 6}
    assert of_six(advantage_scope="batch") == {"actor0": 2, "actor1": 6}
    assert of_six(old_logprob_source="first_replay") == {"actor0": 2, "actor1": 5}
    assert of_six(placement_of("async_train", 2, 2, **ARRIVAL)) == {"actor0": 2, "actor1": 6}
    # one vector each: on actor0 fewer are held than an update takes (1, 2 that came, and the accumulator or a unit)
    assert of_six(placement_of("async_reward", 2, 2, **ARRIVAL)) == {"actor1": 3}
    assert of_six(algorithm="flow_grpo", reference_replay=True, kl_beta=0.1) == {"actor0": 3, "actor1": 9}
    assert of_six(algorithm="kvpo", reward_shape="anchor") == {"actor1": 3}


def test_replays_that_moved():
    """0 and 2 on reward0, 1 on reward1, whatever its judge knows; of 3, 4 and 5 the first is actor0's own."""
    moved = {"train_moved": (3, 0), "scoring": "on_arrival"}
    found = held(workload_of(candidates=6, group_size=3, mini_batches=2), placement_of("stagebreaker", 2, 2, **moved))
    assert vectors(found) == {"actor0": 2, "actor1": 4, "reward0": 4, "reward1": 2}
    assert vectors(found, "received gradients") == {"actor0": 4}


def test_who_is_replayed_and_not_selected_keeps_its_gradient_until_the_step_ends():
    """Two groups of three, one of each trained: three per mini-batch on one GPU, of which one is folded."""
    chosen = workload_of(candidates=6, group_size=3, mini_batches=2, train_per_group=1)
    found = held(chosen, placement_of("merged_replay", 1, 1, **ARRIVAL))
    assert vectors(found) == {"actor0": 2 * 2 + 3 * 2}
    late = held(chosen, placement_of("async_reward_merged", 1, 1, **ARRIVAL))
    assert vectors(late) == {"actor0": 2}
    # On a GPU that does not update, a replay that nobody waits for may still run when the last update has come.
    both = held(chosen, placement_of("merged_replay", 2, 1, **ARRIVAL))
    assert vectors(both, "adapter")["actor1"] == 2 + 3


def test_the_update_gpu_holds_what_the_others_send():
    """As it was made; one scaled vector of each candidate where the gradients are scaled in their place."""
    found = held(FOUR, placement_of("merged_replay", 2, 1, **ARRIVAL))
    assert vectors(found, "received gradients") == {"actor0": 2}
    late = held(FOUR, placement_of("async_reward_merged", 2, 1, **ARRIVAL))
    assert vectors(late, "received gradients") == {"actor0": 2}
    seeded = held(FOUR, placement_of("async_reward", 2, 1, **ARRIVAL))
    assert vectors(seeded, "received gradients") == {}  # an update takes five vectors, the folds before it only three
    assert vectors(seeded, "update buffers") == {"actor0": 5}
    loose = held(FOUR.with_(deterministic=False), placement_of("merged_replay", 2, 1, **ARRIVAL))
    assert vectors(loose, "received gradients") == {"actor0": 1}
    assert vectors(loose) == {"actor0": 2, "actor1": 1 + 2}  # the first, scaled and sent, is kept


def test_a_gpu_that_only_updates_holds_the_sums_of_the_others():
    loose = workload_of(candidates=6, group_size=6, deterministic=False)
    found = held(loose, placement_of("stagebreaker", 1, 1, **ARRIVAL, train_moved=(6,)))
    assert vectors(found) == {"reward0": 12}
    assert vectors(found, "received gradients") == {"actor0": 6}
    assert vectors(found, "accumulator") == {"actor0": 1}


def test_a_candidate_that_is_split_by_step_is_scaled_and_sent_part_by_part():
    """Two mini-batches of six on the reward GPU, candidate 0 in two parts: 7 vectors leave and are kept there."""
    loose = workload_of(candidates=12, group_size=6, mini_batches=2, deterministic=False)
    split = Split(candidate=0, steps=((0, 1), (2,)), lanes=("reward0", "reward0"))
    found = held(loose, placement_of("stagebreaker", 1, 1, **ARRIVAL, train_moved=(6, 6), splits=(split,)))
    assert vectors(found, "received gradients") == {"actor0": 7}
    assert vectors(found) == {"reward0": 7 + 6 * 2}


def test_every_version_of_the_adapter_is_kept_until_the_step_ends():
    """In the policy, the initial one, and those before the updates so far: three while the last mini-batch replays."""
    three = held(workload_of(candidates=6, group_size=3, mini_batches=3), placement_of("merged_replay", 2, 1))
    assert vectors(three, "adapter") == {"actor0": 5, "actor1": 5}
    # one that only computes old log-probs has all four in the end
    old = workload_of(candidates=6, group_size=3, mini_batches=3, old_logprob_source="recompute")
    idle = held(old, placement_of("stagebreaker", 2, 1, old_moved=(1, 1, 1)))
    assert vectors(idle, "adapter") == {"actor0": 5, "actor1": 5, "reward0": 6}


# -- timings ---------------------------------------------------------------------------------------------

COUNTED = dict.fromkeys(MEMORY, 0) | {"adapter": 1, "gradient_buffer": 1, "optimizer": 2}
"""Vectors of the adapter's length and nothing else."""


def lifetimes(workload, graph, assignment, timeline):
    """(lane, from, until, vectors) of all that ``executor.worker`` keeps in a simulated step; a tick is 1/4 us.

    A result is there just before its task ends, beside the units it is made of; what a fold or an update drops, it
    drops after it has made its own.
    """
    lane_of, rows, forever = assignment.lane_of, {row.task: row for row in timeline.rows}, 4 * timeline.makespan_us + 4
    by_id, update_lane = graph.by_id, lane_of["update:0"]
    start = {task: 4 * rows[task].start_us for task in lane_of if task in rows}
    end = {task: 4 * rows[task].end_us for task in lane_of if task in rows}
    policy = ("generate", "old_replay", "ref_replay", "loss_replay", "grad_replay", "update")
    for lane in {lane_of[task.id] for task in graph.tasks if task.kind in policy}:
        yield lane, 0, forever, 3 + 3 * (lane == update_lane)  # in the policy, initial, this step's; FlatAdamW
        for update in graph.of_kind("update"):
            here = lane == update_lane
            yield lane, end[update.id] if here else 4 * rows[f"sync:{update.id}/adapter>{lane}"].end_us, forever, 1
    folds = graph.of_kind("fold")
    fold_of = {need.task: fold.id for fold in folds for need in fold.needs if need.data}
    update_of = {need.task: update.id for update in graph.of_kind("update") for need in update.needs}
    seeded = {t.id for t in graph.tasks if any(by_id[n.task].kind == "advantage" for n in t.needs)}
    for task in graph.tasks:
        if task.kind != "grad_replay" and task.id not in fold_of:
            continue
        lane, fold, count = lane_of[task.id], fold_of.get(task.id), 1
        if task.id not in seeded:
            same = task.kind == "generate" or (workload.old_logprob_source == "first_replay" and task.mini_batch == 0)
            count = (1 if same or workload.algorithm == "kvpo" else 2) + workload.gaussian_kl
            whole = workload.algorithm == "kvpo" or task.kind == "generate"
            yield (
                lane,
                start[task.id] + 1,
                end[task.id],
                1 if whole else len(task.steps or range(workload.trained_steps)),
            )
        here = fold is not None and lane_of[fold] == lane
        yield lane, end[task.id] - 1, end[fold] if here else forever, count
        if fold is not None and not here:
            data = next(need.data for need in by_id[fold].needs if need.task == task.id)
            arrival = 4 * rows[f"transfer:{task.id}/{data}>{lane_of[fold]}"].end_us
            yield lane_of[fold], arrival, end[fold], count
    first = {}
    for fold in sorted(folds, key=lambda fold: start[fold.id]):
        lane, update = lane_of[fold.id], update_of[fold.id]
        parts = [need.task for need in fold.needs if need.data]
        scaled = 0 if set(parts) <= seeded else len(parts)
        if workload.deterministic:
            # the accumulator is made when the first candidate is scaled and its gradient dropped
            yield lane, start[fold.id] + 1, end[fold.id], max(0, scaled - (update not in first))
            first.setdefault(update, start[fold.id])
            continue
        yield lane, start[fold.id] + 1, end[fold.id], scaled
        yield lane, end[fold.id], start[update] + 2 if lane == update_lane else forever, len(parts)
        if lane != update_lane:
            arrival = 4 * rows[f"transfer:{fold.id}/gradient>{update_lane}"].end_us
            yield update_lane, arrival, start[update] + 2, len(parts)
    for update in graph.of_kind("update"):
        yield update_lane, first.get(update.id, start[update.id]) + 1, end[update.id], 1
        yield update_lane, start[update.id] + 3, end[update.id], 4  # mean, the optimizer's copy, two temporaries


def most_held(found, before=None):
    """lane -> most vectors at any time (``before`` a tick of each lane)."""
    changes = {}
    for lane, since, until, count in found:
        assert since < until
        changes.setdefault(lane, []).extend([(since, 1, count), (until, 0, -count)])
    most = {}
    for lane, events in changes.items():
        now = most[lane] = 0
        for tick, _, count in sorted(events):
            now += count
            if before is None or tick < before[lane]:
                most[lane] = max(most[lane], now)
    return most


def counted(workload, placement, profile, **more):
    """(lane -> vectors of its budget, lane -> most in a simulated step, its lifetimes, its timeline)."""
    graph, assignment = build(workload, placement)
    timeline, _ = simulated(workload, placement, profile)
    nothing = dict.fromkeys(profile.sizes_bytes, 0)
    sized = profile.model_copy(update={"memory_bytes": COUNTED | more, "sizes_bytes": nothing})
    budgeted = {lane: budget.total_bytes for lane, budget in held(workload, placement, sized).items()}
    found = list(lifetimes(workload, graph, assignment, timeline))
    return budgeted, most_held(found), found, timeline


@pytest.mark.parametrize(
    ("schedule", "fields", "moved", "expected"),
    [
        # 12 gradients when the first is folded, the accumulator; policy, initial, this step's version; FlatAdamW 3
        ("async_reward", {"candidates": 12, "group_size": 12}, {}, {"actor0": 12 + 1 + 3 + 3}),
        # 12 of its own and the last of 12 others has just come
        ("colocated", {"candidates": 24, "group_size": 12}, {}, {"gpu0": 12 + 12 + 1 + 3 + 3, "gpu1": 12 + 4}),
        # g+ and g- of 6 and, while the last is replayed, its three units
        ("merged_replay", {"candidates": 6, "group_size": 6}, {}, {"actor0": 6 * 2 + 3 + 3 + 3}),
        # at the last replay one update is made: one version more; the gradients of mini-batch 0 are gone
        ("merged_replay", {"candidates": 6, "group_size": 6, "mini_batches": 2}, {}, {"actor0": 3 * 2 + 3 + 4 + 3}),
        # all replays on the reward GPU, which keeps what it has sent
        (
            "stagebreaker",
            {"candidates": 6, "group_size": 3},
            {"train_moved": (6,)},
            {"actor0": 6 * 2 + 1 + 3 + 3, "reward0": 6 * 2 + 3 + 3},
        ),
        # scaled there, 6 vectors are added here: the optimizer is not at work yet
        (
            "stagebreaker",
            {"candidates": 6, "group_size": 3, "deterministic": False},
            {"train_moved": (6,)},
            {"actor0": 6 + 1 + 3 + 3, "reward0": 6 * 2 + 3 + 3},
        ),
        # the second mini-batch finds the three vectors that were scaled and sent in the first; actor0 only updates
        (
            "stagebreaker",
            {"candidates": 6, "group_size": 3, "mini_batches": 2, "deterministic": False},
            {"train_moved": (3, 3)},
            {"actor0": 5 + 4 + 3, "reward0": 3 + 3 * 2 + 3 + 4},
        ),
    ],
)
def test_budgets_that_a_step_reaches(schedule, fields, moved, expected):
    """One GPU of each role; the first fold is late and so long that all the others arrive while it runs."""
    profile = profile_of(
        "continuous", t0=900, generate=10, vae_decode=3, loss_replay=5, grad_replay=20, fold=900, update=1
    )
    scoring = {} if schedule == "colocated" else ARRIVAL
    budgeted, seen, _, _ = counted(workload_of(**fields), placement_of(schedule, 1, 1, **scoring, **moved), profile)
    assert {lane: count for lane, count in budgeted.items() if count} == expected
    assert seen == expected


def later(profile):
    """The same profile with every task 1 us longer: an instant has a before and an after."""
    longer = [task.model_copy(update={"samples_us": tuple(us + 1 for us in task.samples_us)}) for task in profile.tasks]
    return profile.model_copy(update={"tasks": tuple(longer)})


@settings(deadline=None, suppress_health_check=list(HealthCheck), max_examples=150)
@given(workloads(), profiles().map(later), st.data())
def test_no_step_ever_holds_more_than_the_budget(workload, profile, data):
    placement = data.draw(placements(workload))
    budgeted, seen, found, timeline = counted(workload, placement, profile)
    over = {lane: (count, budgeted[lane]) for lane, count in seen.items() if count > budgeted[lane]}
    assert not over
    # While the judge is there, the policy and its copy of the adapter are not; switching back ends that.
    back = {row.gpu: 4 * row.end_us for row in timeline.rows if row.kind == "switch" and row.task.endswith(".policy")}
    if back:
        huge = 10**6
        judging, _, _, _ = counted(workload, placement, profile, judge_weights=huge)
        early = most_held([item for item in found if item[0] in back], back)
        assert all(count - 1 <= judging[lane] - huge for lane, count in early.items())


# -- what is not known -----------------------------------------------------------------------------------


def test_without_memory_in_the_profile_nothing_is_said_and_nothing_is_too_large():
    silent = PROFILE.model_copy(update={"memory_bytes": {}})
    placement = placement_of("merged_replay", 2, 1, **ARRIVAL)
    assert held(FOUR, placement, silent, memory_bytes=1) == {}
    graph, assignment = build(FOUR, placement)
    assert Memory(FOUR, graph, silent, Cluster.equal(3, "gpu", 1)).worst(assignment) is None


def test_without_a_capacity_everything_fits():
    found = held(FOUR, placement_of("merged_replay", 2, 1, **ARRIVAL), memory_bytes=0)
    assert all(budget.fits and budget.over_bytes == 0 for budget in found.values())
    assert found["actor0"].short(1) == "actor0 needs 27.69 GB: adapter 5.60 GB"


def test_a_memory_kind_that_is_needed_and_absent_is_an_error():
    part = PROFILE.model_copy(update={"memory_bytes": {k: v for k, v in MEMORY.items() if k != "kv_cache"}})
    with pytest.raises(InputError, match=r"no memory_bytes\.kv_cache; it has adapter, .*; add it"):
        held(FOUR, placement_of("merged_replay", 2, 1, **ARRIVAL), part)


def test_the_worst_gpu_is_the_one_that_lacks_most():
    placement = placement_of("stagebreaker", 2, 1, **ARRIVAL, train_moved=(0, 1))
    graph, assignment = build(FOUR, placement)
    gpus = Cluster.equal(3, "gpu", 20_000 * MEGA)
    worst = Memory(FOUR, graph, PROFILE, gpus).worst(assignment)
    assert worst is not None
    assert worst.lane == "reward0"
    assert Memory(FOUR, graph, PROFILE, Cluster.equal(3, "gpu", 80_000 * MEGA)).worst(assignment) is None


def test_sizes_for_people():
    assert [gigabytes(n) for n in (0, 3_450 * MEGA, 20 * MEGA, 9_000_000, 500)] == [
        "0.00 GB", "3.45 GB", "0.02 GB", "9 MB", "0.0005 MB",
    ]  # fmt: skip
