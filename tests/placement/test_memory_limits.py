"""Placements over a GPU's memory: counted, named line by line, never returned.

LoRA of rank 256 on all linears of Wan-1.3B: one vector of its 350 M parameters is 1.40 GB in fp32, so a candidate in
flight keeps 2.8 GB of g+ and g-. The 24 GB card of a user's report is too small for it; one of 30 GB holds some.
"""

import json
import sys

import pytest
from builders import placement_of, profile_of, workload_of

from stagebreaker.placement import __main__ as command
from stagebreaker.placement.certificate import Certificate, verify
from stagebreaker.placement.planner import make_plan
from stagebreaker.placement.report import budgets_of, report
from stagebreaker.placement.search import probe_scoring, search
from stagebreaker.placement.space import Space
from stagebreaker.profiles.document import InputError
from stagebreaker.profiles.table import GpuKind, Profile
from stagebreaker.sim.memory import budgets
from stagebreaker.sim.plan import Plan
from stagebreaker.sim.schedules import SCHEDULES, build
from stagebreaker.sim.workload import Cluster

MEGA = 1_000_000
CARD = 30_000 * MEGA
MEMORY = {
    "policy_weights": 2_840 * MEGA,
    "adapter": 1_400 * MEGA,
    "kv_cache": 3_450 * MEGA,
    "gradient_buffer": 1_400 * MEGA,
    "optimizer": 2_800 * MEGA,
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
SIZES = {"trajectory": 20 * MEGA, "latents": 4 * MEGA, "frames": 100 * MEGA}
COSTS = profile_of(
    "dynamic", t0=60, t1=2, generate=10, vae_decode=3, loss_replay=5, grad_replay=20, switch=40, sizes_bytes=SIZES
)
KIND = GpuKind(name="gpu", model="card of 30 GB", memory_bytes=CARD)
PROFILE = COSTS.model_copy(update={"memory_bytes": MEMORY, "gpu_kinds": (KIND,)})
FOUR = workload_of(candidates=4, group_size=2, mini_batches=2)
MODES = ("one_batch", "on_arrival")


def on(gpus, memory_bytes=CARD):
    return Cluster.equal(gpus, "gpu", memory_bytes)


def held_by(placement, cluster, profile=PROFILE, workload=FOUR):
    graph, assignment = build(workload, placement)
    return budgets(workload, graph, assignment, profile, cluster)


def fits(workload, placement, cluster):
    return all(budget.fits for budget in held_by(placement, cluster, workload=workload))


@pytest.fixture(scope="module")
def planned():
    return make_plan(FOUR, on(3), PROFILE, None, MODES)


def test_placements_over_memory_are_counted_and_never_returned(planned):
    """The judge leaves 9.9 GB: no reward GPU can train. Actors can, one candidate of a mini-batch at a time or two."""
    result = planned.result
    assert planned.plan.best == "stagebreaker"
    for found in result.regions:
        listed = list(found.region.placements())
        fitting = [p for p in listed if fits(FOUR, p, on(3))]
        assert {p.train_moved for p in fitting} == {(0, 0)}
        assert (found.simulated, found.infeasible) == (len(fitting), len(listed) - len(fitting))
        assert fits(FOUR, found.best, on(3))
        assert found.runner_up is None or fits(FOUR, found.runner_up[1], on(3))
    assert result.simulated + result.infeasible == result.space.size
    assert report(planned, 0.0)["infeasible"] == {"memory": result.infeasible}


def test_the_24_gb_card_of_the_report_lacks_3_gb_at_rank_256_and_has_room_at_128():
    """The GPU that updates: 27.69 GB (tests/sim/test_memory.py), 26.94 if it decodes nothing: no VAE (0.25), no frames
    (2 x 0.1), activations of a replay (1.0 for 1.3). Half the rank: 14 vectors of 0.7 GB less."""
    small = on(3, 24_000 * MEGA)
    space = Space.of(FOUR, 3, (2, 1), ("one_batch",))
    message = search(FOUR, small, PROFILE, space).nothing_fits()
    assert "lacks 2.94 GB: actor0 needs 26.94 GB of 24.00 GB: adapter 5.60 GB, " in message
    half = MEMORY | {name: MEMORY[name] // 2 for name in ("adapter", "gradient_buffer", "optimizer")}
    halved = PROFILE.model_copy(update={"memory_bytes": half})
    found = search(FOUR, small, halved, space)
    assert 0 < found.simulated < space.size
    assert 17_138 * MEGA <= held_by(found.best.best, small, halved)[0].total_bytes <= 17_888 * MEGA


def quick_judge(memory=MEMORY):
    """Scores cost little and switches nothing, training much."""
    costs = profile_of("dynamic", t0=1, generate=10, vae_decode=3, grad_replay=40, sizes_bytes=SIZES)
    return costs.model_copy(update={"memory_bytes": memory, "gpu_kinds": (KIND,)})


def test_with_more_memory_reward_gpus_train():
    space = Space.of(FOUR, 2, None, ("one_batch",))
    tight, wide = (search(FOUR, on(2, size), quick_judge(), space) for size in (CARD, 2 * CARD))
    assert wide.infeasible == 0 < tight.infeasible
    assert any(wide.best.best.train_moved)
    assert not any(tight.best.best.train_moved)
    assert wide.best.step_us < tight.best.step_us


def test_nothing_fits_is_one_line_with_the_tightest_gpu():
    """One mini-batch: 4 candidates in flight keep 11.2 GB on the GPU that updates; 31.89 GB with all it decodes.

    At best nothing is decoded there: no VAE (0.25), no frames (2 x 0.1), activations of a replay (1.0 for 1.3).
    """
    four = workload_of(candidates=4, group_size=2)
    message = search(four, on(3), PROFILE, Space.of(four, 3, (2, 1), ("one_batch",))).nothing_fits()
    assert message.startswith(
        "none of the 25 placements fits into memory; the nearest, on 2 actor + 1 reward GPUs, lacks 1.14 GB: "
        "actor0 needs 31.14 GB of 30.00 GB: gradient buffers 5.60 GB, received gradients 5.60 GB, "
    )
    assert "take GPUs with more memory" in message
    # 8 GB more of policy, and no other schedule fits either
    heavy = PROFILE.model_copy(update={"memory_bytes": MEMORY | {"policy_weights": 10_840 * MEGA}})
    with pytest.raises(
        InputError, match=r"lacks 9\.14 GB: actor0 needs 39\.14 GB of 30\.00 GB: policy 10\.84 GB"
    ) as error:
        make_plan(four, on(3), heavy, (2, 1), ("one_batch",))
    assert "\n" not in str(error.value)


def test_where_only_waiting_for_the_scores_fits_that_is_the_plan(tmp_path):
    """Eight candidates in one mini-batch: without their advantage they are two vectors each, with it one.

    With it, the GPU that updates needs 29.34 GB: 6.54 of policy, cache and VAE, 9 vectors (4 of its own, 4 received,
    the sum), 3 adapters, 3 of the optimizer, 4 x 0.124 of trajectories, latents and videos, 1.3 to decode.
    """
    eight = workload_of(candidates=8, group_size=8)
    planned = make_plan(eight, on(3), PROFILE, (2, 1), ("one_batch",))
    assert planned.plan.best == planned.best_baseline == "async_reward"
    assert budgets_of(planned.plan, "async_reward")[0].total_bytes == 29_336 * MEGA
    assert {"stagebreaker", "merged_replay", "async_reward_merged"} <= set(planned.unfit)
    assert planned.plan.schedules["stagebreaker"].best_split_step_us is None
    certificate = planned.certificate
    assert (certificate.best, certificate.step_us, certificate.simulated) == (None, None, 0)
    assert certificate.infeasible == {"memory": certificate.space_size}
    certificate.save(tmp_path / "c.json")
    assert verify(Certificate.load(tmp_path / "c.json")) == []
    data = json.loads(certificate.to_json())
    problems = verify(Certificate.parse(data | {"step_us": 1}, "changed"))
    assert problems == ["no region has a placement that fits, but there is a best"]


def test_the_certificate_recounts(planned):
    certificate = planned.certificate
    assert verify(certificate) == []
    data = json.loads(certificate.to_json())
    region = data["regions"][0]
    for change, expected in (
        ({"infeasible": {"memory": data["infeasible"]["memory"] - 1}}, "are accounted for"),
        ({"best": None}, "best is missing"),
        ({"infeasible": {"bad luck": data["infeasible"]["memory"]}}, "are over a GPU's memory"),
        (
            {"regions": [region | {"infeasible": region["infeasible"] - 1}, *data["regions"][1:]]},
            "are over a GPU's memory",
        ),
        ({"cluster": json.loads(on(3, CARD // 2).to_json())}, "is over a GPU's memory"),
        ({"cluster": json.loads(on(3, 2 * CARD).to_json())}, "but 0 are over a GPU's memory"),
    ):
        problems = verify(Certificate.parse(data | change, "changed"), samples=5)
        assert any(expected in problem for problem in problems), problems


def test_a_winner_that_does_not_fit_is_not_confirmed(planned):
    data = json.loads(planned.certificate.to_json())
    greedy = data["runner_up"] | {"train_moved": [1, 0]}
    problems = verify(Certificate.parse(data | {"runner_up": greedy}, "changed"), samples=1)
    assert any("does not fit: reward" in problem for problem in problems), problems


def test_a_split_of_which_nothing_fits_is_counted_whole():
    """A heavier policy: the one actor of 1+2 keeps two candidates in flight and does not fit, each of two keeps one.

    4 GB more: 30.99 GB with four vectors in flight, 29.54 with two and a sum that comes; nothing is decoded there.
    """
    loose = workload_of(candidates=4, group_size=2, mini_batches=2, advantage_scope="batch", deterministic=False)
    heavy = PROFILE.model_copy(update={"memory_bytes": MEMORY | {"policy_weights": 6_840 * MEGA}})
    planned = make_plan(loose, on(3), heavy, None, ("one_batch",))
    (large,) = planned.result.too_large
    assert (large.region.actors, large.budget.lane) == (1, "actor0")
    assert large.budget.total_bytes == 30_986 * MEGA
    assert [(r.actors, r.size) for r in planned.certificate.too_large] == [(1, large.region.size)]
    assert planned.certificate.infeasible["memory"] >= large.region.size
    assert verify(planned.certificate) == []
    data = json.loads(planned.certificate.to_json())
    data["too_large"][0].update(actors=2)
    data["regions"][0]["actors"], data["regions"][0]["rewards"] = 1, 2
    data["too_large"][0]["rewards"] = 1
    problems = verify(Certificate.parse(data, "swapped"), samples=1)
    assert any("placements fit into memory" in problem for problem in problems), problems


def test_schedules_that_do_not_fit_are_shown_and_never_best():
    """A judge that fills the card: stage by stage what is stored and the moments do not leave, and it is over."""
    quick = quick_judge(MEMORY | {"judge_weights": 21_000 * MEGA})
    free = make_plan(FOUR, on(2, 0), quick, None, ("one_batch",))
    assert SCHEDULES[free.plan.best].everywhere
    planned = make_plan(FOUR, on(2), quick, None, ("one_batch",))
    assert {"colocated", "colocated_merged"} <= set(planned.unfit)
    assert planned.unfit["colocated_merged"].phase == "judge"
    assert planned.plan.best not in planned.unfit
    assert planned.best_baseline not in planned.unfit
    assert planned.plan.schedules["colocated_merged"].best_split_step_us is None
    shown = report(planned, 0.0)["unfit"]["colocated_merged"]
    assert shown["fits"] is False
    assert shown["total_bytes"] == sum(line["size_bytes"] for line in shown["lines"]) > CARD


def test_no_baseline_fits():
    """A GPU with the policy has no room to decode: only the schedule that moves its decodes fits."""
    memory = dict.fromkeys(MEMORY, 0) | {"vae_decode_activations": 20_000 * MEGA, "policy_weights": 10_000 * MEGA}
    planned = make_plan(FOUR, on(2), PROFILE.model_copy(update={"memory_bytes": memory}), None, ("one_batch",))
    assert planned.best_baseline is None
    assert planned.plan.best == "stagebreaker"
    assert planned.plan.schedules["stagebreaker"].placement.vae_moved == 4
    assert planned.summary["stagebreaker"].speedup_vs_best_baseline is None
    assert report(planned, 0.0)["best"]["best_baseline"] is None


def test_the_probe_looks_at_what_fits_only():
    assert probe_scoring(FOUR, on(3), PROFILE, 3, None) in MODES
    assert probe_scoring(FOUR, on(3, 1), PROFILE, 3, None) == "one_batch"


def test_a_profile_without_memory_plans_as_before_byte_for_byte():
    silent, text = COSTS, COSTS.to_json()
    assert "memory_bytes" not in json.loads(text)
    assert Profile.parse(json.loads(text), "text") == silent
    tiny, unlimited = (make_plan(FOUR, on(3, size), silent, None, ("one_batch",)) for size in (1, 0))
    assert tiny.plan.model_copy(update={"cluster": unlimited.plan.cluster}).to_json() == unlimited.plan.to_json()
    assert "memory_bytes" not in json.loads(tiny.plan.to_json())["profile"]
    assert tiny.certificate.infeasible == {}


def test_capacity_alone_never_changes_what_fits_everywhere():
    space = Space.of(FOUR, 3, None, ("one_batch",))
    wide, none = (search(FOUR, on(3, size), PROFILE, space) for size in (10**12, 0))
    assert wide == none


# -- commands --------------------------------------------------------------------------------------------


@pytest.fixture
def saved(planned, tmp_path):
    planned.plan.save(tmp_path / "plan.json")
    return tmp_path / "plan.json"


def run(monkeypatch, *arguments):
    monkeypatch.setattr(sys, "argv", ["stagebreaker-plan", *map(str, arguments)])
    command.main()


def test_a_plan_keeps_its_memory(saved, planned):
    assert Plan.load(saved) == planned.plan


@pytest.mark.parametrize("what", ["explain", "simulate"])
def test_commands_print_the_budget_line_by_line(what, saved, monkeypatch, capsys):
    run(monkeypatch, what, saved)
    out = capsys.readouterr().out
    assert "memory per GPU, at most" in out
    for line in ("KV cache", "gradient buffers", "received gradients", "optimizer", "judge reserve", "of 30.00 GB"):
        assert line in out
    assert "DOES NOT FIT" not in out


def test_simulate_says_it_to_machines(saved, planned, monkeypatch, capsys):
    run(monkeypatch, "simulate", saved, "--schedule", "merged_replay", "--json")
    memory = json.loads(capsys.readouterr().out)["memory"]
    item = planned.plan.schedules["merged_replay"].placement
    assert placement_of("merged_replay", item.actors, item.rewards, scoring=item.scoring) == item
    assert [budget["gpu"] for budget in memory] == [lane.name for lane in planned.graphs["merged_replay"].lanes]
    assert all(budget["fits"] and budget["capacity_bytes"] == CARD for budget in memory)


def test_the_plan_command_says_what_does_not_fit(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    FOUR.save(tmp_path / "four.yaml")
    PROFILE.save(tmp_path / "p.json")
    arguments = ["--workload", "four.yaml", "--profile", "p.json", "--gpus", "3", "--out", "plan"]
    run(monkeypatch, *arguments)
    out = capsys.readouterr().out
    assert "over a GPU's memory" in out
    PROFILE.model_copy(update={"memory_bytes": MEMORY | {"policy_weights": CARD}}).save(tmp_path / "p.json")
    with pytest.raises(SystemExit) as stop:
        run(monkeypatch, *arguments, "--set", "mini_batches=1", "--actors", "2", "--rewards", "1")
    assert stop.value.code == 2
    error = capsys.readouterr().err.strip().splitlines()[-1]
    assert error.startswith("error: none of the 25 placements fits into memory")
