"""A run end to end on real engines: the same adapter whatever the placement, and what happens when something fails."""

import json

import pytest
import torch
from runs import adapter_of, judged_by, place, plan_of, program_of, quick_engines, rel_difference, run, small

from stagebreaker.executor import worker
from stagebreaker.executor.algorithms.advantages import advantages
from stagebreaker.executor.checkpoint import latest
from stagebreaker.executor.rewards.judges import TinyVlmJudge
from stagebreaker.executor.runner import Program
from stagebreaker.profiles.cli import RunFailedError
from stagebreaker.profiles.document import InputError
from stagebreaker.sim.plan import Split

CLIP = {"clip_low": 3e-4, "clip_high": 3e-4}
"""Bounds that second mini-batches of the small workload cross."""

MOVED = {"vae_moved": 2, "train_moved": (1, 1)}


@pytest.fixture(autouse=True, scope="module")
def _quick():
    with pytest.MonkeyPatch.context() as patch:
        quick_engines(patch)
        judged_by(patch)
        yield


@pytest.fixture(scope="module")
def reference(tmp_path_factory):
    """Three steps of merged replay on one actor and one reward GPU."""
    out = tmp_path_factory.mktemp("reference")
    return run(small(**CLIP), place("merged_replay"), out), out


@pytest.fixture(scope="module")
def staged(tmp_path_factory):
    """Three steps stage by stage."""
    out = tmp_path_factory.mktemp("staged")
    return run(small(**CLIP), place("colocated"), out), out


def sha(made, step):
    """Checksum of a fixture's run after ``step`` steps."""
    return made[0].metrics[step - 1]["sb/adapter_sha256"]


def test_the_reference_run_is_worth_comparing_with(reference):
    """Ratios leave 1 in the second mini-batch, some units are clipped, rewards differ, the adapter moves."""
    result, _ = reference
    assert [line["step"] for line in result.metrics] == [1, 2, 3]
    assert all(0 < line["actor/clip_fraction"] < 0.5 for line in result.metrics)
    assert all(line["actor/ratio_max_deviation"] > 1e-4 for line in result.metrics)
    assert [line["sb/adapter_version"] for line in result.metrics] == [2, 4, 6]
    assert len({line["sb/adapter_sha256"] for line in result.metrics}) == 3
    assert result.adapter_sha256 == result.metrics[-1]["sb/adapter_sha256"]
    assert len({r for line in result.metrics for r in line["sb/rewards"].values()}) == 12
    assert all(line["sb/rollout/finished"] == 4 for line in result.metrics)
    assert all(line["sb/rollout/discarded"] == 0 for line in result.metrics)


@pytest.mark.parametrize(
    "placement",
    [
        place("stagebreaker", **MOVED),
        place("stagebreaker", 1, 2, scoring="one_batch", vae_moved=4, train_moved=(2, 2)),
        place("merged_replay", 2, 1),
        place("stagebreaker", 2, 1, scoring="per_mini_batch", vae_moved=1, train_moved=(0, 1)),
        place("colocated_merged", 2, 1),
        place("async_reward_merged"),
    ],
    ids=lambda p: f"{p.schedule}-{p.actors}+{p.rewards}",
)
def test_merged_schedules_give_the_same_bits(reference, tmp_path, placement):
    result = run(small(**CLIP), placement, tmp_path)
    assert [line["sb/adapter_sha256"] for line in result.metrics] == [
        line["sb/adapter_sha256"] for line in reference[0].metrics
    ]
    assert result.metrics[-1]["sb/rewards"] == reference[0].metrics[-1]["sb/rewards"]


@pytest.mark.parametrize("placement", [place("async_reward"), place("async_reward", 2, 1)], ids=["1+1", "2+1"])
def test_stage_centric_schedules_give_the_same_bits(staged, tmp_path, placement):
    assert run(small(**CLIP), placement, tmp_path).adapter_sha256 == staged[0].adapter_sha256


def test_the_two_classes_agree_to_rounding(reference, staged):
    assert staged[0].adapter_sha256 != reference[0].adapter_sha256
    (merged_P, moments), (staged_P, others) = adapter_of(reference[1]), adapter_of(staged[1])
    assert rel_difference(merged_P, staged_P) < 1e-5
    assert rel_difference(moments["exp_avg_P"], others["exp_avg_P"]) < 1e-5
    assert staged[0].metrics[-1]["actor/clip_fraction"] == reference[0].metrics[-1]["actor/clip_fraction"]


def test_loss_and_grad_with_late_rewards_is_of_the_merged_class(reference, tmp_path):
    """async_train replays twice, but its backward cannot know the advantage."""
    assert run(small(**CLIP), place("async_train"), tmp_path, steps=2).adapter_sha256 == sha(reference, 2)


@pytest.mark.parametrize(
    "placement", [place("stagebreaker", 2, 1, **MOVED), place("colocated")], ids=lambda p: p.schedule
)
def test_folding_where_gradients_live_changes_no_bit_here(reference, staged, tmp_path, placement):
    want = staged if placement.schedule == "colocated" else reference
    found = run(small(**CLIP, deterministic=False), placement, tmp_path, steps=1)
    assert found.adapter_sha256 == sha(want, 1)


def test_candidates_split_by_step(reference, tmp_path):
    """A part of one step holds one unit, so the sum has the same terms; it may round in another place."""
    splits = tuple(
        Split(candidate=i, steps=((0,), (1,)), lanes=lanes)
        for i, lanes in ((1, ("actor0", "reward0")), (2, ("reward0", "actor0")))
    )
    placement = place("stagebreaker", splits=splits)
    result = run(small(**CLIP), placement, tmp_path, steps=2)
    (got_P, _), (want_P, _) = adapter_of(tmp_path), adapter_of(reference[1], step=2)
    assert rel_difference(got_P, want_P) < 1e-5
    lanes = {row.task: row.gpu for row in result.timelines[0].rows if row.kind == "grad_replay"}
    assert lanes["grad_replay:1.k0"] == "actor0"
    assert lanes["grad_replay:1.k1"] == "reward0"
    assert "grad_replay:1" not in lanes
    assert result.metrics[0]["actor/clip_fraction"] == reference[0].metrics[0]["actor/clip_fraction"]


@pytest.mark.parametrize("schedule", ["async_reward", "colocated"])
def test_a_stage_centric_replay_split_by_step(staged, tmp_path, schedule):
    """Each part seeds its own units, not the candidate's first."""
    lanes = ("gpu1", "gpu0") if schedule == "colocated" else ("actor0", "reward0")
    splits = (Split(candidate=2, steps=((1,), (0,)), lanes=lanes),)
    run(small(**CLIP), place(schedule, splits=splits), tmp_path, steps=2)
    assert rel_difference(adapter_of(tmp_path)[0], adapter_of(staged[1], step=2)[0]) < 1e-5


@pytest.mark.parametrize("deterministic", [True, False])
def test_uneven_shares_give_the_gradient_of_one_worker(tmp_path, deterministic):
    """Six candidates, two mini-batches of three, on one actor and on four: 2 + 2 + 1 + 1."""
    workload = small(candidates=6, group_size=3, deterministic=deterministic, **CLIP)
    shas = [
        run(workload, place("merged_replay", actors), tmp_path / str(actors), steps=1).adapter_sha256
        for actors in (1, 4)
    ]
    assert shas[0] == shas[1]


def test_uneven_mini_batches(tmp_path):
    """Five of one group would not divide; 6 in 4 mini-batches are 2, 2, 1, 1."""
    workload = small(candidates=6, group_size=6, mini_batches=4)
    result = run(workload, place("stagebreaker", 1, 2, train_moved=(1, 1, 1, 0)), tmp_path, steps=1)
    assert result.metrics[0]["sb/adapter_version"] == 4
    assert run(workload, place("merged_replay"), tmp_path / "one", steps=1).adapter_sha256 == result.adapter_sha256


# -- old log-probs, advantages, pairs


def test_old_log_probs_from_rollout_and_recomputed_are_one_number(reference, tmp_path):
    result = run(small(old_logprob_source="recompute", **CLIP), place("stagebreaker", **MOVED), tmp_path, steps=2)
    assert result.adapter_sha256 == sha(reference, 2)
    replays = [row for row in result.timelines[0].rows if row.kind == "old_replay"]
    assert len(replays) == 4


@pytest.mark.parametrize("schedule", ["stagebreaker", "colocated"])
def test_first_replay_has_ratio_one_then_the_frozen_adapters_log_probs(tmp_path, schedule, request):
    """On this device a replay repeats the rollout's bits, so the run equals the one with rollout log-probs."""
    want = request.getfixturevalue("staged" if schedule == "colocated" else "reference")
    result = run(small(old_logprob_source="first_replay", **CLIP), place(schedule), tmp_path, steps=2)
    assert result.adapter_sha256 == sha(want, 2)
    replayed = sorted(row.candidate for row in result.timelines[0].rows if row.kind == "old_replay")
    assert replayed == [2, 3]


def test_the_first_mini_batch_has_ratio_one_and_the_second_has_not(tmp_path):
    for source in ("rollout", "first_replay", "recompute"):
        values = step_values(small(old_logprob_source=source), place("merged_replay"))
        ratios = {i: values[f"grad_replay:{i}"]["ratio"] for i in range(4)}
        assert ratios[0] == ratios[1] == [1.0, 1.0]
        assert all(abs(r - 1) > 1e-5 for i in (2, 3) for r in ratios[i])
        assert values["grad_replay:0"]["buffers"] == 1
        for i in (2, 3):
            for k, ratio in enumerate(ratios[i]):
                new, old = values[f"grad_replay:{i}"]["logp"][k], values[f"generate:{i}"][k]
                assert ratio == pytest.approx(torch.exp(torch.tensor(new - old)).item(), abs=1e-6)


def step_values(workload, placement):
    """Every small result of one inline step."""
    from stagebreaker.executor.algorithms.dancegrpo import DanceGRPO
    from stagebreaker.executor.backends import Inline
    from stagebreaker.executor.controller import run_step
    from stagebreaker.executor.rl import RLStep

    program = program_of(workload, placement)
    backend = Inline(workload, program.graph.lanes, program.kinds(), "cpu", "float32")
    algorithm = DanceGRPO(workload.trained_steps, workload.clip_low, workload.clip_high)
    step = RLStep(workload, program.graph, algorithm, 0, 0, ("a kite", "a river"))
    return run_step(program.index, program.assignment, program.serving, backend, step).values


SCORES = {"c0": 0.1, "c1": 0.4, "c2": 0.8, "c3": 0.2}


@pytest.mark.parametrize("scope", ["group", "minibatch", "batch"])
@pytest.mark.parametrize("schedule", ["merged_replay", "async_reward"])
def test_advantage_scopes(tmp_path, monkeypatch, scope, schedule):
    judged_by(monkeypatch, **SCORES)
    result = run(small(advantage_scope=scope, mini_batches=1), place(schedule), tmp_path, steps=1)
    scores = {int(name[1:]): value for name, value in SCORES.items()}
    groups, whole = {0: 0, 1: 0, 2: 1, 3: 1}, dict.fromkeys(range(4), 0)
    want = advantages(scores, groups, scope=scope, mini_batches=whole).values
    assert {int(i): a for i, a in result.metrics[0]["sb/advantages"].items()} == want
    assert result.metrics[0]["critic/rewards/mean"] == pytest.approx(0.375)
    if scope == "group":
        assert want[0] == pytest.approx(-0.5 * 2**0.5)
    else:
        assert want[2] == pytest.approx(0.3 / (sum((s - 0.375) ** 2 for s in scores.values()) / 3) ** 0.5)


def test_a_group_that_two_mini_batches_share(tmp_path, monkeypatch):
    """Four of one group in two mini-batches: mean and deviation run over all four."""
    judged_by(monkeypatch, **SCORES)
    result = run(small(group_size=4), place("merged_replay"), tmp_path, steps=1)
    want = advantages({int(n[1:]): s for n, s in SCORES.items()}, dict.fromkeys(range(4), 0)).values
    assert {int(i): a for i, a in result.metrics[0]["sb/advantages"].items()} == want


def test_tied_scores_leave_the_direction_to_weight_decay(tmp_path, monkeypatch):
    judged_by(monkeypatch, **dict.fromkeys(SCORES, 0.8345))
    line = run(small(), place("merged_replay"), tmp_path, steps=1).metrics[0]
    assert line["sb/advantages"] == dict.fromkeys("0123", 0.0)
    assert line["actor/grad_norm"] == 0
    assert line["sb/reward/zero_std_groups"] == 2


PAIRS = {"c0_1": 1.0, "c0_2": 0.0, "c1_2": 0.5, "c3_4": 0.0, "c3_5": 0.0, "c4_5": 1.0}


@pytest.mark.parametrize("scoring", ["on_arrival", "one_batch"])
def test_all_pairs_reward_the_share_of_comparisons_won(tmp_path, monkeypatch, scoring):
    judged_by(monkeypatch, **PAIRS)
    workload = small(candidates=6, group_size=3, reward_shape="all_pairs")
    placement = place("stagebreaker", 1, 2, scoring=scoring, vae_moved=3)
    result = run(workload, placement, tmp_path, steps=1)
    line = result.metrics[0]
    assert line["sb/rewards"] == {name[1:].replace("_", "-"): value for name, value in PAIRS.items()}
    want = advantages(dict(enumerate([0.5, 0.25, 0.75, 0.0, 1.0, 0.5])), {i: i // 3 for i in range(6)}).values
    assert {int(i): a for i, a in line["sb/advantages"].items()} == want
    assert (line["critic/rewards/min"], line["critic/rewards/max"]) == (0.0, 1.0)


def test_the_tiny_judge_scores_by_the_same_rule(tmp_path, monkeypatch, reference):
    monkeypatch.setattr(worker, "TinyVlmJudge", TinyVlmJudge)
    result = run(small(**CLIP), place("merged_replay"), tmp_path, steps=1)
    assert result.adapter_sha256 == sha(reference, 1)


def test_the_tiny_judge_compares_pairs(tmp_path, monkeypatch):
    monkeypatch.setattr(worker, "TinyVlmJudge", TinyVlmJudge)
    workload = small(reward_shape="all_pairs", mini_batches=1)
    result = run(workload, place("merged_replay"), tmp_path, steps=1)
    assert set(result.metrics[0]["sb/rewards"]) == {"0-1", "2-3"}
    assert set(result.metrics[0]["sb/rewards"].values()) <= {0.0, 1.0}
    assert sorted(result.metrics[0]["sb/advantages"].values()) == pytest.approx([-(0.5**0.5)] * 2 + [0.5**0.5] * 2)


# -- candidates without a score


def test_an_unscorable_candidate_fails_the_run_by_name(tmp_path, monkeypatch):
    judged_by(monkeypatch, broken=("1",))
    with pytest.raises(RunFailedError, match=r"step 1: no usable score for candidates \[1\]"):
        run(small(), place("merged_replay"), tmp_path)
    assert not (tmp_path / "metrics.jsonl").exists()


def test_mask_candidate_leaves_it_out_of_mean_deviation_and_sum(tmp_path, monkeypatch):
    judged_by(monkeypatch, broken=("1",), c0=1.0, c2=3.0, c3=4.0)
    workload = small(group_size=4, on_unscorable="mask_candidate")
    result = run(workload, place("stagebreaker", **MOVED), tmp_path, steps=1)
    line = result.metrics[0]
    assert line["sb/rewards"] == {"0": 1.0, "1": None, "2": 3.0, "3": 4.0}
    assert line["sb/reward/failed"] == 1
    assert line["sb/masked"] == {"1": "unscorable (score None)"}
    assert line["sb/rollout/discarded"] == 1
    assert line["sb/updates_skipped"] == 0
    assert line["critic/rewards/min"] == 1.0
    assert line["critic/rewards/mean"] == pytest.approx(8 / 3)
    assert line["sb/advantages"] == {
        "0": pytest.approx(-1.0911, abs=1e-4),
        "2": pytest.approx(0.2182, abs=1e-4),
        "3": pytest.approx(0.8729, abs=1e-4),
    }
    staged = run(workload, place("colocated"), tmp_path / "staged", steps=1)
    assert staged.metrics[0]["sb/advantages"] == line["sb/advantages"]
    assert rel_difference(adapter_of(tmp_path)[0], adapter_of(tmp_path / "staged")[0]) < 1e-5
    apart = run(workload.with_(deterministic=False), place("merged_replay", 2), tmp_path / "apart", steps=1)
    assert apart.adapter_sha256 == result.adapter_sha256


@pytest.mark.parametrize("deterministic", [True, False])
def test_a_wholly_masked_mini_batch_skips_its_update_and_says_so(tmp_path, monkeypatch, deterministic):
    """drop_group takes mini-batch 1 away; the version still moves on, and mini-batch 2 trains as ever."""
    judged_by(monkeypatch, broken=("1",), c2=0.0, c3=1.0)
    workload = small(on_unscorable="drop_group", deterministic=deterministic)
    result = run(workload, place("merged_replay", 2), tmp_path, steps=1)
    line = result.metrics[0]
    assert line["sb/updates_skipped"] == 1
    assert line["sb/adapter_version"] == 2
    assert set(line["sb/advantages"]) == {"2", "3"}
    assert line["sb/masked"]["0"] == "group 0 dropped: candidate 1 is unscorable"
    assert line["sb/reward/failed"] == 1
    assert line["actor/ratio_max_deviation"] == 0
    state = adapter_of(tmp_path)[1]
    assert state["step"] == 1


def test_a_lone_survivor_is_masked_too(tmp_path, monkeypatch):
    judged_by(monkeypatch, broken=("2",))
    line = run(small(on_unscorable="mask_candidate"), place("merged_replay"), tmp_path, steps=1).metrics[0]
    assert line["sb/masked"] == {"2": "unscorable (score None)", "3": "the only scored candidate of group 1"}
    assert line["sb/updates_skipped"] == 1


def test_recorded_rewards_stand_in_for_the_judge(tmp_path, monkeypatch):
    recorded = [{"0": 0.3, "1": 0.1, "2": None, "3": 0.7}] * 2
    workload = small(group_size=4, on_unscorable="mask_candidate")
    result = run(workload, place("merged_replay"), tmp_path, steps=2, recorded=recorded)
    assert [line["sb/rewards"] for line in result.metrics] == recorded


# -- warm-up, resume, refusals


def test_the_warm_up_leaves_no_trace(reference, tmp_path):
    result = run(small(**CLIP), place("stagebreaker", 2, 1, **MOVED), tmp_path, steps=2, warmup=True)
    assert result.adapter_sha256 == sha(reference, 2)
    assert [line["sb/adapter_version"] for line in result.metrics] == [2, 4]
    assert len(result.step_us) == 2


@pytest.mark.parametrize("warmup", [False, True])
def test_resume_equals_the_uninterrupted_run(reference, tmp_path, warmup):
    """On other lanes, too."""
    whole, whole_out = reference
    first = run(small(**CLIP), place("merged_replay"), tmp_path, steps=2)
    assert first.adapter_sha256 == whole.metrics[1]["sb/adapter_sha256"]
    resumed = run(small(**CLIP), place("stagebreaker", 2, 1, **MOVED), tmp_path, resume=True, warmup=warmup)
    assert resumed.adapter_sha256 == whole.adapter_sha256
    assert [line["step"] for line in resumed.metrics] == [3]
    assert resumed.metrics[0]["sb/rewards"] == whole.metrics[2]["sb/rewards"]
    (got_P, got), (want_P, want) = adapter_of(tmp_path), adapter_of(whole_out)
    assert torch.equal(got_P, want_P)
    assert set(got) == set(want) == {"exp_avg_P", "exp_avg_sq_P", "step"}
    assert all(torch.equal(got[name], want[name]) for name in want)
    assert want["step"] == 6
    lines = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == [1, 2, 3]


def test_resume_when_all_is_done_does_nothing(reference, tmp_path):
    run(small(), place("merged_replay"), tmp_path, steps=1)
    again = run(small(), place("merged_replay"), tmp_path, steps=1, resume=True)
    assert again.timelines == []
    assert again.adapter_sha256 == json.loads((latest(tmp_path)[1] / "state.json").read_text())["adapter_sha256"]


def test_resume_without_a_checkpoint_is_refused(tmp_path):
    with pytest.raises(InputError, match="holds no checkpoint; run without --resume"):
        run(small(), place("merged_replay"), tmp_path, resume=True)


def test_a_failing_task_names_task_gpu_and_how_to_resume(tmp_path, monkeypatch):
    from stagebreaker.executor.worker import Worker

    calls = []

    def grad_replay(self, order):
        calls.append(order.task.id)
        if order.rl_step == 1 and order.task.id == "grad_replay:2":
            raise OverflowError("out of memory")
        return original(self, order)

    original = Worker._grad_replay
    monkeypatch.setattr(Worker, "_grad_replay", grad_replay)
    with pytest.raises(RunFailedError) as caught:
        run(small(), place("merged_replay", 2), tmp_path)
    assert str(caught.value) == (
        "step 2: task grad_replay:2 on actor0 failed: OverflowError: out of memory; "
        f"resume after step 1 with --resume --out {tmp_path}"
    )
    assert latest(tmp_path)[0] == 1
    monkeypatch.setattr(Worker, "_grad_replay", original)
    whole = run(small(), place("merged_replay", 2), tmp_path / "whole", steps=2)
    assert run(small(), place("merged_replay"), tmp_path, steps=2, resume=True).adapter_sha256 == whole.adapter_sha256


def test_a_gpu_with_another_adapter_is_named(tmp_path, monkeypatch):
    """After every step all GPUs with a policy must have the same version and checksum."""
    from stagebreaker.executor.worker import Worker

    def receive(self, task, data, message):
        if task == "update:1":
            return
        original(self, task, data, message)

    original = Worker.receive
    monkeypatch.setattr(Worker, "receive", receive)
    with pytest.raises(RunFailedError, match=r"step 1: actor1 has adapter version 1 \(.{12}\), the update GPU 2 \("):
        run(small(), place("merged_replay", 2), tmp_path)


def test_a_damaged_adapter_is_refused_on_arrival(tmp_path, monkeypatch):
    from stagebreaker.executor.worker import Worker

    def export(self, task, data):
        message = original(self, task, data)
        return {**message, "vector": message["vector"] * 2} if data == "adapter" else message

    original = Worker.export
    monkeypatch.setattr(Worker, "export", export)
    with pytest.raises(RunFailedError, match=r"update:0/adapter on actor1 failed: VersionError: adapter version 1 arr"):
        run(small(), place("merged_replay", 2), tmp_path)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"reference_replay": True}, "reference_replay=true has no loss"),
        ({"reward_shape": "anchor"}, "reward_shape='anchor' has no judge yet"),
        ({"algorithm": "flow_grpo"}, "algorithm='flow_grpo' has no kernels yet"),
    ],
)
def test_what_the_engines_cannot_do_is_refused_before_anything_starts(tmp_path, fields, message):
    with pytest.raises(InputError, match=message):
        run(small(**fields), place("merged_replay"), tmp_path)


def test_a_plan_whose_lists_were_edited_is_refused():
    plan = plan_of(small(), place("stagebreaker", 2, 1, **MOVED))
    item = plan.schedules["stagebreaker"]
    moved = item.model_copy(update={"lane_of": {**item.lane_of, "vae_decode:3": "reward0"}})
    swapped = item.model_copy(update={"order": {**item.order, "actor0": item.order["actor0"][::-1]}})
    for edited, message in ((moved, "task vae_decode:3 is not where"), (swapped, "a queue's order is not where")):
        with pytest.raises(InputError, match=message):
            Program.of(plan.model_copy(update={"schedules": {"stagebreaker": edited}}), "stagebreaker")
    with pytest.raises(InputError, match="plan's workload was changed after planning"):
        Program.of(plan.model_copy(update={"workload": small(seed=1)}), "stagebreaker")
    assert Program.of(plan, "stagebreaker").policy_lanes() == [0, 1, 2]
