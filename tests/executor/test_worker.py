"""One worker's task bodies: deterministic, versioned, and refused where something does not fit."""

import numpy as np
import pytest
import torch
from runs import judged_by, quick_engines, small

from stagebreaker.executor.kernels.reward_async import FoldError, SignGradients
from stagebreaker.executor.rewards.protocol import Scored
from stagebreaker.executor.worker import Order, VersionError, Worker, check_executable
from stagebreaker.profiles.document import InputError
from stagebreaker.sim.dataflow import Need, Task

PROMPTS = ("a kite over a field", "a slow river")
ENCODE = Task("encode_prompt:0", "encode_prompt", group=0)
GENERATE = Task("generate:1", "generate", (Need("encode_prompt:0", "embeddings"),), candidate=1, group=0)
DECODE = Task("vae_decode:1", "vae_decode", (Need("generate:1", "latents"),), candidate=1)
REPLAY = Task("grad_replay:1", "grad_replay", (Need("generate:1", "trajectory"),), candidate=1, mini_batch=0)
OLD = Task("old_replay:1", "old_replay", (Need("generate:1", "trajectory"),), candidate=1, mini_batch=1)
LOSS = Task("loss_replay:1", "loss_replay", (Need("generate:1", "trajectory"),), candidate=1, mini_batch=1)
FOLD = Task("fold:1", "fold", (Need("grad_replay:1", "gradient"), Need("advantage:0")), candidate=1, mini_batch=0)
UPDATE = Task("update:0", "update", (Need("fold:1"),), mini_batch=0)


@pytest.fixture(autouse=True, scope="module")
def _quick():
    with pytest.MonkeyPatch.context() as patch:
        quick_engines(patch)
        yield


def order(task, version=0, rl_step=0, values=None, parts=None):
    return Order(task, rl_step, version, PROMPTS, values or {}, parts or {})


def advantage(value, candidate=1):
    return {"advantage:0": {"values": {} if value is None else {str(candidate): value}}}


def rolled_out(**fields):
    worker = Worker(small(**fields))
    worker.run(order(ENCODE))
    return worker, worker.run(order(GENERATE))


def updated(worker, value=1.0):
    worker.run(order(REPLAY))
    worker.run(order(FOLD, values=advantage(value), parts={1: 1}))
    return worker.run(order(UPDATE, parts={1: 1}))


def test_tasks_are_functions_of_their_orders():
    """Again, on another worker, after other candidates: the same bits."""
    first, logp = rolled_out()
    second = Worker(small())
    second.run(order(ENCODE))
    for candidate in (0, 3, 1):
        task = Task(f"generate:{candidate}", "generate", GENERATE.needs, candidate=candidate, group=0)
        again = second.run(order(task))
    assert again == logp
    for worker in (first, second):
        worker.run(order(DECODE))
    assert np.array_equal(first.store["vae_decode:1", "frames"], second.store["vae_decode:1", "frames"])
    assert torch.equal(first.store["generate:1", "latents"], second.store["generate:1", "latents"])
    replays = [worker.run(order(REPLAY)) for worker in (first, second, first)]
    assert replays[0] == replays[1] == replays[2]
    assert first.run(order(GENERATE, rl_step=1)) != logp


def test_a_fresh_replay_repeats_the_rollouts_log_probs():
    worker, logp = rolled_out()
    found = worker.run(order(REPLAY))
    assert found["logp"] == logp
    assert found["ratio"] == [1.0, 1.0]
    assert (found["units"], found["buffers"], found["cut_if_positive"], found["cut_if_negative"]) == (2, 1, 0, 0)
    assert worker.run(order(LOSS)) == logp


def test_a_trajectory_replayed_elsewhere_gives_the_same_gradient():
    here, _ = rolled_out()
    there = Worker(small())
    there.receive("generate:1", "trajectory", here.export("generate:1", "trajectory"))
    assert there.run(order(REPLAY)) == here.run(order(REPLAY))
    gradients = [w.store["grad_replay:1", "gradient"] for w in (here, there)]
    assert torch.equal(gradients[0].plus_P, gradients[1].plus_P)
    here.store.clear()
    here.receive("grad_replay:1", "sign_gradients", there.export("grad_replay:1", "sign_gradients"))
    assert isinstance(here.store["grad_replay:1", "gradient"], SignGradients)


def test_an_update_moves_the_adapter_and_old_replays_stay_behind():
    worker, logp = rolled_out()
    report = updated(worker)
    assert (report["adapter_version"], report["skipped"], report["candidates"]) == (1, False, 1)
    assert report["grad_norm"] > 0
    assert worker.adapter_state() == (1, report["sha256"])
    assert worker.run(order(OLD, version=0)) == logp
    assert worker.run(order(LOSS, version=1)) != logp
    assert worker.run(order(OLD, version=0)) == logp
    assert sorted(worker.vectors) == [0, 1]


@pytest.mark.parametrize("task", [GENERATE, OLD, LOSS, REPLAY, UPDATE], ids=lambda t: t.kind)
def test_a_task_for_a_version_that_is_not_here_is_refused(task):
    worker, _ = rolled_out()
    with pytest.raises(VersionError, match=r"adapter version 1 is not on this GPU; it has \[0\]"):
        worker.run(order(task, version=1, parts={1: 1}))


def test_an_adapter_travels_with_its_checksum():
    source, _ = rolled_out()
    report = updated(source)
    target = Worker(small())
    message = source.export("update:0", "adapter")
    target.receive("update:0", "adapter", message)
    assert target.adapter_state() == source.adapter_state() == (1, report["sha256"])
    vector = message["vector"].copy()
    vector[3] = np.nextafter(vector[3], np.float32(9))
    with pytest.raises(VersionError, match="adapter version 1 arrived with checksum"):
        Worker(small()).receive("update:0", "adapter", {**message, "vector": vector})


def test_the_judge_answers_by_name(monkeypatch):
    judged_by(monkeypatch, broken=("0",), c1=0.75)
    worker = Worker(small())
    for i in range(2):
        worker.store[f"vae_decode:{i}", "frames"] = np.zeros((2, 8, 8, 3), dtype=np.uint8)
    found = worker.run(order(Task("score:reward0#0", "score", members=("1", "0"))))
    assert list(found) == ["1", "0"]
    assert found["1"] == Scored(0.75)
    assert found["0"].reason == "the judge gave no verdict"
    assert worker.run(order(Task("request:1", "request", members=("1",)))) == {"1": Scored(0.75)}
    with pytest.raises(KeyError):
        worker.run(order(Task("score:reward0#1", "score", members=("2",))))


def test_the_graph_decides_the_kernel():
    """With an advantage the replay seeds; without, it keeps g+ and g-; scaled, both are one gradient."""
    worker, logp = rolled_out()
    values = {**advantage(-0.7), "loss_replay:1": logp}
    worker.run(order(REPLAY, values=values))
    seeded_P = worker.store["grad_replay:1", "gradient"]
    worker.run(order(REPLAY))
    signed = worker.store["grad_replay:1", "gradient"]
    assert isinstance(seeded_P, torch.Tensor)
    difference = (signed.apply(-0.7) - seeded_P).abs().max()
    assert seeded_P.abs().max() > 0
    assert difference <= 1e-5 * seeded_P.abs().max()


def test_a_seeded_part_uses_the_log_probs_of_its_own_steps():
    worker, logp = rolled_out()
    values = {**advantage(0.9), "loss_replay:1": logp}
    worker.run(order(REPLAY, values=values))
    whole_P = worker.store["grad_replay:1", "gradient"]
    parts = []
    for k in (1, 0):
        part = Task(f"grad_replay:1.k{k}", "grad_replay", REPLAY.needs, candidate=1, mini_batch=0, steps=(k,))
        report = worker.run(order(part, values=values))
        assert report["logp"] == [logp[k]]
        assert report["ratio"] == [1.0]
        parts.append(worker.store[part.id, "gradient"])
    assert all(part_P.any() for part_P in parts)
    assert (sum(parts) - whole_P).abs().max() <= 1e-5 * whole_P.abs().max()


def test_old_log_probs_of_an_old_replay_are_the_parts_own():
    worker, logp = rolled_out()
    part = Task("grad_replay:1.k1", "grad_replay", REPLAY.needs, candidate=1, mini_batch=0, steps=(1,))
    shifted = [logp[0] + 5.0, logp[1] - 0.25]
    report = worker.run(order(part, values={"old_replay:1": shifted}))
    assert report["ratio"] == [pytest.approx(np.exp(0.25), rel=1e-6)]


def test_a_masked_candidate_costs_no_update():
    worker, _ = rolled_out()
    before = worker.adapter.vector()
    report = updated(worker, value=None)
    assert report == {
        "grad_norm": 0.0,
        "clipped": False,
        "skipped": True,
        "adapter_version": 1,
        "sha256": worker.adapter.sha256(before),
        "candidates": 1,
    }
    assert torch.equal(worker.vectors[1], before)
    assert worker.optimizer.state_dict()["step"] == 0


def test_an_update_without_all_its_folds_is_refused():
    worker, _ = rolled_out()
    worker.run(order(REPLAY))
    worker.run(order(FOLD, values=advantage(1.0), parts={1: 1, 3: 1}))
    with pytest.raises(FoldError, match=r"3\.0 are missing"):
        worker.run(order(UPDATE, parts={1: 1, 3: 1}))


def test_the_end_of_a_step_forgets_and_a_reset_starts_over():
    worker, logp = rolled_out()
    sha = worker.adapter_state()[1]
    updated(worker)
    assert worker.end_step() > 0
    assert sorted(worker.vectors) == [1]
    assert worker.store == {}
    worker.reset()
    assert worker.adapter_state() == (0, sha)
    assert worker.optimizer.state_dict()["step"] == 0
    worker.run(order(ENCODE))
    assert worker.run(order(GENERATE)) == logp


def test_engines_that_are_not_needed_are_not_loaded():
    worker = Worker(small())
    worker.warm(("score", "vae_decode", "switch"))
    assert {"judge", "vae"} <= set(vars(worker))
    assert "_policy_and_adapter" not in vars(worker)
    worker.warm(("grad_replay",))
    assert "_policy_and_adapter" in vars(worker)


def test_what_has_no_kernel_is_refused():
    with pytest.raises(InputError, match="reference_replay=true"):
        Worker(small(reference_replay=True))
    with pytest.raises(InputError, match="algorithm='flow_grpo' has no kernels yet"):
        Worker(small(algorithm="flow_grpo", reference_replay=True, kl_beta=0.04))
    with pytest.raises(InputError, match="train_per_group=1 is not selected by any engine yet; real engines run"):
        check_executable(small(train_per_group=1, mini_batches=1))
    check_executable(small())
    check_executable(small(), "stagebreaker")
