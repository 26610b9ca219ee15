"""What each published number means, on timelines made by hand."""

import pytest
from builders import placement_of

from stagebreaker.sim.dataflow import Lane
from stagebreaker.sim.published import (
    BASELINES,
    METRICS,
    Case,
    Published,
    all_cases,
    busy_share,
    decode_share_of_rollout,
    published,
    redundant_replay_share,
    reward_train_share,
    rollout_us,
    scoring_behind_rollout,
    shipped_profile,
    steps_of,
    tail_after_scores,
    training_us,
    wait_for_reward_share,
    wasted_share,
)
from stagebreaker.sim.timeline import Row, Timeline

LANES = {"actor0": "actor", "actor1": "actor", "reward0": "reward", "gpu0": "all", "gpu1": "all"}


def timeline(*spans):
    """Each span: "task lane start end"."""
    rows = []
    for span in spans:
        task, lane, start, end = span.split()
        where = lane.removeprefix("link:")
        rows.append(
            Row(task, task.split(":")[0], None, "", "", "", None, lane, LANES[where], int(start), int(start), int(end))
        )
    names = sorted({row.gpu for row in rows if "link" not in row.gpu})
    return Timeline(tuple(rows), tuple(Lane(name, LANES[name], i) for i, name in enumerate(names)))


REWARD_FIRST = timeline(
    "generate:0 actor0 0 30",
    "vae_decode:0 actor0 30 40",
    "transfer:vae_decode:0/frames>reward0 link:actor0 40 41",
    "generate:1 actor1 0 20",
    "vae_decode:1 actor1 20 30",
    "request:1 reward0 30 70",
    "score:reward0#0 reward0 30 70",
    "grad_replay:0 actor0 70 90",
    "grad_replay:1 actor1 80 90",
    "fold:0 actor0 90 90",
    "update:0 actor0 90 100",
    "sync:update:0/adapter>actor1 link:actor0 100 100",
)
STAGES = timeline(
    "generate:0 gpu0 0 30",
    "generate:1 gpu1 0 25",
    "switch:gpu0.judge gpu0 30 35",
    "switch:gpu1.judge gpu1 30 35",
    "score:gpu0#0 gpu0 35 55",
    "score:gpu1#0 gpu1 35 45",
    "switch:gpu0.policy gpu0 55 60",
    "switch:gpu1.policy gpu1 55 60",
    "loss_replay:0 gpu0 60 70",
    "loss_replay:1 gpu1 60 65",
    "grad_replay:0 gpu0 70 95",
    "grad_replay:1 gpu1 70 95",
    "update:0 gpu0 95 100",
)


def test_waiting_runs_from_the_last_rollout_task_of_an_actor_to_its_first_training_task():
    assert wait_for_reward_share(REWARD_FIRST) == ((70 - 40) + (80 - 30)) / 2 / 100


def test_busy_shares_count_neither_links_nor_requests():
    assert busy_share(REWARD_FIRST, "reward") == 0.4
    assert busy_share(REWARD_FIRST, "actor") == (40 + 30 + 30 + 10) / 200


def test_wasted_time_is_actors_waiting_for_rewards_and_reward_gpus_idle():
    assert wasted_share(REWARD_FIRST) == pytest.approx((2 * 40 + 60) / 300)


def test_scoring_is_hidden_until_the_last_rollout_task_of_the_actors():
    assert rollout_us(REWARD_FIRST) == 40
    assert scoring_behind_rollout(REWARD_FIRST) == 10 / 40


def test_training_time_runs_to_the_end_of_the_step():
    assert training_us(REWARD_FIRST) == 30


def test_tail_after_the_last_score():
    assert tail_after_scores(REWARD_FIRST) == pytest.approx(0.3)


def test_decoding_share_of_rollout():
    assert decode_share_of_rollout(REWARD_FIRST) == 20 / 70


def test_shares_of_the_colocated_step():
    assert reward_train_share(STAGES) == ((20 + 10) / 2 + 40) / 100
    assert redundant_replay_share(STAGES) == (10 + 5) / 200


def test_speedup_is_over_the_schedule_named_last():
    steps = {"async_reward": REWARD_FIRST, "colocated": timeline("generate:0 gpu0 0 80")}
    assert METRICS["async_reward_vs_colocated"](steps) == 0.8


def test_a_range_is_the_low_and_the_high_over_its_cases():
    cases = [Case(pair, 12) for pair in ("dancegrpo-urflex", "dancegrpo-vrt", "kvpo-urflex", "kvpo-vrt")]
    lengths = (80, 50, 100, 90)
    steps = {
        case: {"colocated": timeline(f"generate:0 gpu0 0 {n}"), "async_reward": REWARD_FIRST}
        for case, n in zip(cases, lengths, strict=True)
    }
    row = Published("fig9.x", "default", "async_reward_vs_colocated", 0.5, 1.0, True)
    assert row.read(steps) == (0.5, 1.0)
    assert Published("fig9.x_max", "default", "async_reward_vs_colocated", 1, 1, True).read(steps) == (1.0, 1.0)


def test_every_row_has_a_metric_and_cases():
    rows = published()
    assert len({row.id for row in rows}) == len(rows) == 24
    assert sum(row.id.startswith("fig16.") for row in rows) == 15
    assert sum(row.id.startswith("fig9.") for row in rows) == 7
    for row in rows:
        assert row.metric in METRICS
        assert row.cases
        assert row.low <= row.high
    assert not any(row.used_in_fit for row in rows if row.id == "fig3.redundant_replay_share")


@pytest.mark.parametrize("case", all_cases(), ids=lambda case: f"{case.pair}-{case.candidates}")
def test_where_old_log_probabilities_come_from_is_inferred_per_schedule(case):
    sources = {name: case.workload(name).old_logprob_source for name in (*BASELINES, "stagebreaker")}
    assert sources == {
        "colocated": "recompute",
        "async_reward": "recompute",
        "async_train": "rollout",
        "merged_replay": "rollout",
        "stagebreaker": "rollout",
    }
    workload = case.workload("colocated")
    assert (workload.candidates, workload.groups, workload.mini_batches) == (case.candidates, 2, 2)


def test_a_case_is_simulated_at_four_actors_and_two_reward_gpus():
    case = Case("dancegrpo-vrt", 12)
    steps = steps_of(case, placement_of("stagebreaker", 4, 2, vae_moved=8), shipped_profile("fitted-dancegrpo-vrt"))
    assert list(steps) == [*BASELINES, "stagebreaker"]
    assert [lane.name for lane in steps["stagebreaker"].lanes] == [
        *(f"actor{i}" for i in range(4)),
        "reward0",
        "reward1",
    ]
    assert all(row.gpu.startswith("reward") for row in steps["stagebreaker"].rows if row.task == "vae_decode:7")
