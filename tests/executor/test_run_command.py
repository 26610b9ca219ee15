"""stagebreaker-run: what it prints and leaves, and one line instead of a traceback for whatever is wrong."""

import json
import sys

import pytest
import torch
from runs import judged_by, place, plan_of, quick_engines, small

from stagebreaker.executor.__main__ import main
from stagebreaker.placement.__main__ import find_profile
from stagebreaker.sim.workload import Cluster, load_workload

KEYS = {"steps", "step_us", "predicted_step_us", "schedule", "backend", "adapter_sha256", "reward_mean"}


@pytest.fixture(autouse=True, scope="module")
def _quick():
    torch.set_num_threads(1)
    with pytest.MonkeyPatch.context() as patch:
        quick_engines(patch)
        judged_by(patch)
        yield


@pytest.fixture
def command(monkeypatch, capsys, tmp_path):
    """Run the command in this process in an empty folder: (exit code, standard output, error lines but progress)."""
    monkeypatch.chdir(tmp_path)

    def call(*arguments):
        monkeypatch.setattr(sys, "argv", ["stagebreaker-run", *map(str, arguments)])
        try:
            main()
            code = 0
        except SystemExit as stop:
            code = stop.code
        out, err = capsys.readouterr()
        return code, out, [line for line in err.splitlines() if not line.endswith("to do")]

    return call


@pytest.fixture
def plan(tmp_path):
    found = plan_of(small(), place("merged_replay"), place("stagebreaker", vae_moved=2), step_us=5_000_000)
    found.save(tmp_path / "plan.json")
    return tmp_path / "plan.json"


def refused(result, *parts):
    """Exit code 2, one line of error, no traceback, nothing on standard output."""
    code, out, errors = result
    assert (code, out) == (2, "")
    assert len(errors) == 1
    assert errors[0].startswith("error: ")
    for part in parts:
        assert part in errors[0]


def test_a_run_prints_its_object_and_leaves_its_files(command, plan, tmp_path):
    code, out, errors = command("--plan", plan, "--backend", "inline", "--steps", 2, "--json", "--device", "cpu")
    assert (code, errors) == (0, [])
    made = json.loads(out)
    assert set(made) == KEYS
    assert (made["steps"], made["schedule"], made["backend"]) == (2, "merged_replay", "inline")
    assert made["predicted_step_us"] == 5_000_000
    assert len(made["step_us"]) == len(made["reward_mean"]) == 2
    assert all(us > 0 for us in made["step_us"])
    assert all(0 < mean < 1 for mean in made["reward_mean"])
    files = {p.name for p in (tmp_path / "run").iterdir()}
    assert files == {
        "metrics.jsonl",
        "timeline.csv",
        "trace.json",
        "timeline.png",
        "report.json",
        "plan.json",
        "run.json",
        "adapter",
        "checkpoints",
    }
    assert json.loads((tmp_path / "run" / "report.json").read_text()) == made
    trace = json.loads((tmp_path / "run" / "trace.json").read_text())
    names = {e["args"]["name"] for e in trace["traceEvents"] if e["name"] == "process_name"}
    assert names == {"predicted", "measured"}

    refused(command("--plan", plan, "--backend", "inline"), "run holds a run", "--resume", "another folder")

    code, out, _ = command("--plan", plan, "--backend", "inline", "--steps", 3, "--resume", "--json")
    assert (code, json.loads(out)["steps"]) == (0, 1)
    other = ("--plan", plan, "--backend", "inline", "--resume", "--steps", 4)
    refused(command(*other, "--schedule", "stagebreaker"), "has schedule=merged_replay, this one stagebreaker")
    refused(command(*other, "--dtype", "float32"), "has dtype=bfloat16, this one float32")
    whole = command("--plan", plan, "--backend", "inline", "--steps", 3, "--json", "--out", "whole")
    assert json.loads(whole[1])["adapter_sha256"] == json.loads(out)["adapter_sha256"]
    assert len((tmp_path / "run" / "metrics.jsonl").read_text().splitlines()) == 3

    code, out, _ = command("compare", "whole", "--json")
    compared = json.loads(out)
    assert (code, compared["schedule"], compared["unmatched"]) == (0, "merged_replay", [])
    assert {"generate", "vae_decode", "request", "grad_replay", "fold", "update"} <= {
        kind["kind"] for kind in compared["kinds"]
    }

    again = ("--plan", plan, "--backend", "inline", "--schedule", "stagebreaker", "--out", "again", "--json")
    code, out, _ = command(*again, "--steps", 2, "--replay-rewards", "whole")
    assert json.loads(out)["adapter_sha256"] == made["adapter_sha256"]
    refused(command(*again[:-3], "--out", "more", "--steps", 4, "--replay-rewards", "whole"), "has 3 steps", "wants 4")


def test_a_run_prints_tables_for_people(command, plan):
    code, out, _ = command("--plan", plan, "--backend", "inline", "--steps", 1)
    assert code == 0
    assert "merged_replay on inline" in out
    assert "tasks matched by id (medians)" in out
    assert "step: predicted 5.000 s, measured" in out
    assert "wrote metrics.jsonl, timeline.csv, trace.json, timeline.png, adapter to run/" in out


@pytest.mark.parametrize(
    ("arguments", "parts"),
    [
        (("--plan", "nowhere.json"), ("nowhere.json: no such file",)),
        (("--schedule", "stagebraker"), ("'stagebraker' is not in the plan", "did you mean 'stagebreaker'?")),
        (("--backend", "inlin"), ("--backend 'inlin' is unknown", "did you mean 'inline'?")),
        (("--steps", "0"), ("--steps 0 must be at least 1",)),
        (("--workload", "tiny-dancegrpo"), ("plan's workload has candidates=4, the given one 8; plan again",)),
        (("--workload", "tiny-dancegrp"), ("did you mean 'tiny-dancegrpo'?",)),
        (("--cluster", "one.yaml"), ("the plan needs 2 GPUs, the cluster has 1: missing 1",)),
        (("--backend", "inline", "--device", "tpu"), ("--device 'tpu' must be auto, cpu or cuda",)),
        (("--backend", "inline", "--dtype", "float16"), ("--dtype 'float16' must be auto, float32 or bfloat16",)),
        (("--backend", "inline", "--out", "plan.json"), ("--out plan.json: ", "plan.json is a file; give a folder")),
        (("--backend", "inline", "--resume"), ("holds no run; run without --resume",)),
        (("--backend", "inline", "--time-scale", "1"), ("--time-scale has no meaning with --backend inline",)),
        (("--backend", "emulated", "--resume"), ("--resume has no meaning with --backend emulated",)),
        (("--backend", "emulated", "--dtype", "float32"), ("--dtype has no meaning with --backend emulated",)),
        (("--backend", "emulated", "--time-scale", "0"), ("--time-scale 0 must be between 0.02 and 10",)),
        (("--backend", "emulated", "--time-scale", "1e-9"), ("a step of 5.000 s would take 0.0 ms here",)),
        (("--backend", "emulated", "--time-scale", "nan"), ("--time-scale nan must be between",)),
        (("--backend", "inline", "--replay-rewards", "nowhere"), ("nowhere holds no metrics.jsonl",)),
        (("--stepps", "3"), ("No such option", "--help")),
        (("--steps", "many"), ("--help",)),
    ],
    ids=lambda v: " ".join(v) if isinstance(v, tuple) and v[0].startswith("--") else "",
)
def test_bad_input_is_one_line(command, plan, tmp_path, arguments, parts):
    Cluster.equal(1, "gpu").save(tmp_path / "one.yaml")
    refused(command("--plan", plan, *arguments), *parts)
    assert not list(tmp_path.rglob("metrics.jsonl"))


@pytest.mark.parametrize("schedule", ["lean", "one_step_off"])
def test_a_schedule_without_engines_is_refused(command, tmp_path, schedule):
    plan_of(small(), place("merged_replay"), place(schedule)).save(tmp_path / "plan.json")
    arguments = ("--plan", tmp_path / "plan.json", "--schedule", schedule)
    for backend in ((), ("--backend", "inline")):
        parts = (f"schedule {schedule} is simulated only", "run colocated, async_reward", "--backend emulated")
        refused(command(*arguments, *backend), *parts)


def test_an_edited_plan_is_refused(command, plan):
    document = json.loads(plan.read_text())
    document["schedules"]["stagebreaker"]["lane_of"]["vae_decode:3"] = "reward0"
    plan.write_text(json.dumps(document))
    run = ("--plan", plan, "--backend", "inline")
    refused(command(*run, "--schedule", "stagebreaker"), "task vae_decode:3 is not where its placement puts it")
    document["workload"]["learning_rate"] = 0.5
    plan.write_text(json.dumps(document))
    refused(command(*run), "the plan's workload was changed after planning")
    plan.write_text("{")
    refused(command(*run), "plan.json:1: not JSON")
    del document["best"]
    plan.write_text(json.dumps(document))
    refused(command(*run), "best is missing; add it")


@pytest.fixture
def kvpo(tmp_path):
    workload = load_workload("kvpo-vrt")
    profile, _ = find_profile(None, workload.name, workload.profile)
    found = plan_of(
        workload, place("stagebreaker", 4, 2, vae_moved=3, ref_moved=(2, 1)), profile=profile, step_us=50_000_000
    )
    found.save(tmp_path / "kvpo.json")
    return tmp_path / "kvpo.json"


@pytest.mark.parametrize("backend", ["ray", "inline"])
def test_kvpo_has_no_engines_yet(command, kvpo, backend):
    refused(
        command("--plan", kvpo, "--backend", backend),
        "algorithm='kvpo' has no kernels yet",
        "the emulated backend runs any plan",
    )


def test_a_failing_task_ends_with_3_and_says_how_to_go_on(command, plan, monkeypatch):
    from stagebreaker.executor.worker import Worker

    original = Worker._vae_decode

    def fails(self, order):
        if order.rl_step == 1 and order.task.candidate == 2:
            raise MemoryError("no memory for 33 frames")
        return original(self, order)

    with monkeypatch.context() as patch:
        patch.setattr(Worker, "_vae_decode", fails)
        code, out, errors = command("--plan", plan, "--backend", "inline", "--steps", 2)
    assert (code, out) == (3, "")
    assert errors == [
        "error: step 2: task vae_decode:2 on actor0 failed: MemoryError: no memory for 33 frames; "
        "resume after step 1 with --resume --out run"
    ]
    code, out, _ = command("--plan", plan, "--backend", "inline", "--steps", 2, "--resume", "--json")
    assert (code, json.loads(out)["steps"]) == (0, 1)


def test_an_unscorable_candidate_ends_with_3_too(command, plan, monkeypatch):
    judged_by(monkeypatch, broken=("3",))
    code, _, errors = command("--plan", plan, "--backend", "inline")
    assert code == 3
    assert "no usable score for candidates [3]" in errors[0]
    assert "no step was finished: run again" in errors[0]


def test_an_emulated_run_takes_any_plan_and_leaves_everything_but_an_adapter(command, kvpo, tmp_path):
    """KVPO with its anchors and reference replays has no engines; its control plane runs all the same."""
    import ray

    code, out, errors = command("--plan", kvpo, "--backend", "emulated", "--steps", 1, "--time-scale", 0.002, "--json")
    assert (code, errors) == (0, [])
    made = json.loads(out)
    assert set(made) == KEYS
    assert (made["backend"], made["adapter_sha256"], made["reward_mean"]) == ("emulated", "", [None])
    assert made["step_us"][0] > made["predicted_step_us"]
    files = {p.name for p in (tmp_path / "run").iterdir()}
    assert files == {
        "metrics.jsonl",
        "timeline.csv",
        "trace.json",
        "timeline.png",
        "report.json",
        "plan.json",
        "run.json",
    }
    code, out, _ = command("compare", "run", "--json")
    assert (code, json.loads(out)["unmatched"]) == (0, [])
    assert {"generate", "ref_replay", "grad_replay"} <= {kind["kind"] for kind in json.loads(out)["kinds"]}
    assert not ray.is_initialized()
    again = ("--plan", kvpo, "--backend", "emulated", "--steps", 1)
    refused(command(*again), "--out run holds a run", "give another folder")


def test_check_gradients_prints_and_fails(command, monkeypatch):
    from stagebreaker.executor import gradients

    small_check = ("check-gradients", "--set", "trained_steps=1", "--set", "lora_rank=1", "--json")
    monkeypatch.setattr(gradients, "SAMPLERS", ("renoise",))
    code, out, errors = command(*small_check)
    assert (code, errors) == (0, [])
    made = json.loads(out)
    assert set(made) == {"cases", "max_rel_error", "ok"}
    assert made["ok"] is True
    assert made["cases"] >= 40
    assert 0 < made["max_rel_error"]["float64"] < 1e-12 < made["max_rel_error"]["float32"] < 1e-5

    refused(command("check-gradients", "--workload", "kvpo-vrt"), "algorithm='kvpo' has no kernels yet")
    refused(command("check-gradients", "--set", "lora_rnk=3"), "did you mean 'lora_rank'?")

    worse = [gradients.Case("worse", dtype, 2e-5, False, 0) for dtype in gradients.TOLERANCE]
    monkeypatch.setattr(gradients, "check", lambda *_: worse)
    code, out, errors = command(*small_check)
    assert (code, json.loads(out)["ok"]) == (1, False)
    assert errors[0].startswith("error: gradients differ by")
