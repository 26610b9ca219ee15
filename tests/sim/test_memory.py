"""Memory: budgets by hand, gradients that wait for their advantage and those that need not, bounds over timings."""

import pytest
from builders import placement_of, profile_of, simulated, workload_of
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from strategies import profiles, workloads

from stagebreaker.profiles.document import InputError
from stagebreaker.profiles.models import FP32, WAN_1_3B, Lora
from stagebreaker.profiles.table import MEMORY_KINDS
from stagebreaker.sim.memory import Memory, budgets, gigabytes
from stagebreaker.sim.plan import SCORING
from stagebreaker.sim.schedules import SCHEDULES, build, why_not
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


def held(workload, placement, profile=PROFILE, memory_bytes=CARD, timeline=None):
    """lane -> budget."""
    graph, assignment = build(workload, placement)
    cluster = Cluster.equal(len(graph.lanes), profile.gpu_kinds[0].name, memory_bytes)
    return {b.lane: b for b in budgets(workload, graph, assignment, profile, cluster, timeline)}


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
    """Candidates 0 and 2 here, 1 and 3 on the other actor; the mini-batches are {0, 1} and {2, 3}."""
    found = held(FOUR, placement_of("merged_replay", 2, 1, **ARRIVAL))
    assert megabytes(found["actor0"]) == {
        "policy": 2_840,
        "KV cache": 3_450,
        "VAE": 250,
        "gradient buffers": 2 * 1_400,
        "received gradients": 2 * 1_400,
        "unit buffers": 3 * 1_400,
        "accumulator": 1_400,
        "adapter": 1_400,
        "optimizer": 2_800,
        "stored": 2 * 20 + 2 * 100,
        "activations": 1_300,
    }
    assert found["actor0"].total_bytes == 23_480 * MEGA
    assert found["actor0"].fits
    assert found["actor0"].over_bytes == -520 * MEGA
    assert found["actor1"].total_bytes == (23_480 - 2_800 - 1_400 - 2_800) * MEGA
    assert megabytes(found["reward0"]) == {
        "judge": 16_500,
        "judge reserve": 4 * 500,
        "stored": 4 * 100,
        "activations": 1_200,
    }


def test_a_reward_gpu_that_trains_holds_judge_and_policy_and_fits_no_longer():
    found = held(FOUR, placement_of("stagebreaker", 2, 1, **ARRIVAL, vae_moved=1, train_moved=(0, 1)))["reward0"]
    # its judge has given all scores before it trains: no gradient waits here
    assert megabytes(found) == {
        "policy": 2_840,
        "KV cache": 3_450,
        "VAE": 250,
        "unit buffers": 4_200,
        "judge": 16_500,
        "judge reserve": 2_000,
        "adapter": 1_400,
        "stored": 4 * 100 + 4 + 20,
        "activations": 1_300,
    }
    assert not found.fits
    assert (
        found.short(3) == "reward0 needs 32.36 GB of 24.00 GB: judge 16.50 GB, unit buffers 4.20 GB, KV cache 3.45 GB"
    )


def test_one_mini_batch_keeps_twice_the_gradients():
    found = held(workload_of(candidates=4, group_size=2), placement_of("merged_replay", 2, 1, **ARRIVAL))["actor0"]
    assert found.total_bytes == (23_480 + 2 * 2_800) * MEGA
    assert not found.fits
    why = {line.name: line.why for line in found.lines}
    assert why["gradient buffers"] == "2 in mini-batch 0 that may wait for their advantage, 2 vectors each"


def test_engines_that_switch_are_not_there_together():
    found = held(FOUR, placement_of("colocated_merged", 2, 1, **ARRIVAL))
    assert {lane: budget.phase for lane, budget in found.items()} == dict.fromkeys(found, "judge") | {"gpu0": "judge"}
    # two requests here; adapter, moments and what is stored stay: candidates 0 and 3 with their frames
    assert megabytes(found["gpu0"]) == {
        "judge": 16_500,
        "judge reserve": 2 * 500,
        "adapter": 1_400,
        "optimizer": 2_800,
        "stored": 2 * 20 + 2 * 100,
        "activations": 1_200,
    }
    small = PROFILE.model_copy(update={"memory_bytes": MEMORY | {"judge_weights": 0}})
    policy = held(FOUR, placement_of("colocated_merged", 2, 1, **ARRIVAL), small)["gpu0"]
    assert policy.phase == "policy"
    assert "judge reserve" not in megabytes(policy)


def test_the_example_of_twelve_candidates():
    """Two candidates on the busiest of four actors keep 5.6 GB; all twelve on one GPU 33.6 GB."""
    twelve = workload_of(candidates=12, group_size=6, mini_batches=2)
    found = vectors(held(twelve, placement_of("merged_replay", 4, 2, **ARRIVAL)))
    assert max(found.values()) * VECTOR == 5_600 * MEGA
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


# -- which gradients wait --------------------------------------------------------------------------------


@pytest.mark.parametrize("schedule", ["colocated", "async_reward", "colocated_merged", "async_reward_merged"])
def test_none_waits_where_training_comes_after_the_scores(schedule):
    found = held(FOUR, placement_of(schedule, 2, 1, **ARRIVAL))
    assert vectors(found) == {}
    seeded = {"colocated": 1, "async_reward": 1}.get(schedule, 3)  # a known seed needs no unit of its own
    policy = {b.lane: b for b in found.values() if b.phase != "judge"}
    assert set(vectors(policy, "unit buffers").values()) <= {seeded}


def waiting(placement=None, **fields):
    """Vectors per lane of six candidates on two actors in two mini-batches, and the mini-batch where they are most."""
    fields = {"candidates": 6, "group_size": 3, "mini_batches": 2} | fields
    found = held(workload_of(**fields), placement or placement_of("merged_replay", 2, 2, **ARRIVAL))
    return vectors(found)


def test_scope_and_source_decide_how_many_wait():
    assert waiting() == {"actor0": 4, "actor1": 4}  # {0, 2}, {4} and {1}, {3, 5}: the larger one each
    assert waiting(advantage_scope="batch") == {"actor0": 4, "actor1": 2}  # update 0 needs every score
    assert waiting(old_logprob_source="first_replay") == {"actor0": 2, "actor1": 4}
    # one group in two mini-batches: its advantages are known at the first update
    assert waiting(group_size=6) == {"actor0": 4, "actor1": 2}
    assert waiting(algorithm="flow_grpo", reference_replay=True, kl_beta=0.1) == {"actor0": 6, "actor1": 6}


def test_a_group_in_two_mini_batches_waits_only_in_the_first():
    assert waiting(candidates=8, group_size=4, mini_batches=4) == {"actor0": 2, "actor1": 2}


def test_scores_given_on_the_same_gpu_are_known():
    moved = {"train_moved": (3, 0), "scoring": "on_arrival"}
    assert waiting(placement_of("stagebreaker", 2, 1, **moved)) == {"actor0": 2, "actor1": 4}
    # of two judges, each gives only some of a group's scores; actor0 then holds most in mini-batch 0: 6 received, 0 own
    found = held(workload_of(candidates=6, group_size=3, mini_batches=2), placement_of("stagebreaker", 2, 2, **moved))
    assert vectors(found) == {"actor1": 4, "reward0": 4, "reward1": 2}
    assert vectors(found, "received gradients") == {"actor0": 6}


def test_a_branch_of_kvpo_keeps_one_vector_until_its_group_is_replayed():
    kvpo = {"algorithm": "kvpo", "reward_shape": "anchor"}
    assert waiting(**kvpo) == {"actor0": 2, "actor1": 2}
    late = held(
        workload_of(candidates=6, group_size=3, mini_batches=2, **kvpo),
        placement_of("async_reward_merged", 2, 2, **ARRIVAL),
    )
    assert vectors(late) == {"actor0": 2, "actor1": 2}  # the scores are there, the other branches' log-probs are not
    assert vectors(late, "unit buffers") == {"actor0": 1, "actor1": 1}


def test_the_update_gpu_holds_what_the_others_send():
    """Scaled where the advantage is known; summed where the gradients are if order does not matter."""
    found = held(FOUR, placement_of("merged_replay", 2, 1, **ARRIVAL))
    assert vectors(found, "received gradients") == {"actor0": 2}
    late = held(FOUR, placement_of("async_reward_merged", 2, 1, **ARRIVAL))
    assert vectors(late, "received gradients") == {"actor0": 1}
    loose = held(FOUR.with_(deterministic=False), placement_of("merged_replay", 2, 1, **ARRIVAL))
    assert vectors(loose, "received gradients") == {"actor0": 1}
    assert vectors(loose, "accumulator") == {"actor0": 1, "actor1": 1}


def test_old_log_probs_of_later_mini_batches_need_the_adapter_of_the_rollout():
    frozen = held(FOUR.with_(old_logprob_source="first_replay"), placement_of("merged_replay", 2, 1, **ARRIVAL))
    assert megabytes(frozen["actor0"])["adapter"] == 2 * 1_400
    assert megabytes(held(FOUR, placement_of("merged_replay", 2, 1, **ARRIVAL))["actor0"])["adapter"] == 1_400


# -- timings ---------------------------------------------------------------------------------------------


def test_a_timeline_counts_only_those_that_waited_in_it():
    """Scores of one group that come at once against scores that come last."""
    placement = placement_of("merged_replay", 2, 1, **ARRIVAL)
    for t0, expected in ((0, {}), (1000, {"actor0": 2, "actor1": 2})):
        profile = profile_of("continuous", t0=t0, generate=10, grad_replay=20, loss_replay=1, sizes_bytes=SIZES)
        profile = profile.model_copy(update={"memory_bytes": MEMORY})
        timeline, _ = simulated(FOUR, placement, profile)
        assert vectors(held(FOUR, placement, profile, timeline=timeline)) == expected


@settings(deadline=None, suppress_health_check=list(HealthCheck), max_examples=40)
@given(workloads(), profiles(), st.sampled_from(sorted(SCHEDULES)), st.sampled_from(SCORING), st.data())
def test_no_timing_needs_more_than_the_budget(workload, profile, schedule, scoring, data):
    if why_not(schedule, workload) is not None:
        return
    profile = profile.model_copy(update={"memory_bytes": MEMORY})
    moved = {}
    if SCHEDULES[schedule].movable:
        sizes = [len(workload.mini_batch_members(m)) for m in range(workload.mini_batches)]
        moved = {"train_moved": tuple(data.draw(st.integers(0, n)) for n in sizes)}
    placement = placement_of(
        schedule, data.draw(st.integers(1, 3)), data.draw(st.integers(1, 2)), scoring=scoring, **moved
    )
    timeline, _ = simulated(workload, placement, profile)
    static, seen = held(workload, placement, profile), held(workload, placement, profile, timeline=timeline)
    assert list(static) == list(seen)
    for lane, budget in static.items():
        assert seen[lane].total_bytes <= budget.total_bytes


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
    assert found["actor0"].short(1) == "actor0 needs 23.48 GB: unit buffers 4.20 GB"


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
