"""stagebreaker-plan as a user meets it: files, tables, one JSON object, and one line for every bad input."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from builders import profile_of, workload_of

from stagebreaker.placement import __main__ as command
from stagebreaker.placement.certificate import Certificate
from stagebreaker.placement.report import replay
from stagebreaker.profiles.document import InputError
from stagebreaker.sim.critical import by_kind, critical_path
from stagebreaker.sim.plan import Plan
from stagebreaker.sim.schedules import SCHEDULES
from stagebreaker.sim.timeline import COLUMNS
from stagebreaker.sim.workload import Cluster

FIELDS = ("candidates=4", "group_size=2", "default_gpus=2")
SMALL = ("--workload", "dancegrpo-vrt", *(word for field in FIELDS for word in ("--set", field)))
FILES = ["certificate.json", "plan.json", "timeline.csv", "timeline.png", "trace.json"]
SCHEDULE_KEYS = [
    "step_us",
    "best_split_step_us",
    "speedup_vs_colocated",
    "speedup_vs_async_reward",
    "actor_utilisation",
    "reward_utilisation",
]
BEST_KEYS = [
    "schedule",
    "step_us",
    "speedup_vs_best_baseline",
    "actors",
    "rewards",
    "scoring",
    "vae_moved",
    "train_moved",
    "ref_moved",
    "old_moved",
]
KEYS = [
    "schedules",
    "best",
    "lower_bound_us",
    "gap",
    "space_size",
    "simulated",
    "evaluated",
    "pruned",
    "infeasible",
    "seconds",
]
MORE = {
    "schedules": {"speedup_vs_best_baseline", "gap", "off_policy"},
    "best": {"videos_per_s", "videos_per_gpu_s", "best_baseline"},
    "top": {"any_schedule_bound_us", "profile_provenance"},
}
"""Keys beyond those that scripts are promised."""


@pytest.fixture
def run(monkeypatch, capsys, tmp_path):
    """Run the command in an empty folder: (exit code, standard output, standard error)."""
    monkeypatch.chdir(tmp_path)

    def call(*arguments):
        capsys.readouterr()
        monkeypatch.setattr(sys, "argv", ["stagebreaker-plan", *map(str, arguments)])
        try:
            command.main()
            code = 0
        except SystemExit as done:
            code = done.code
        return code, *capsys.readouterr()

    return call


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A folder with a plan of four candidates on two GPUs, its workload and its profile as files."""
    from stagebreaker.placement.planner import make_plan
    from stagebreaker.placement.report import write_outputs

    made = tmp_path_factory.mktemp("planned")
    profile = profile_of("dynamic", t0=9, t1=1, generate=3, vae_decode=2, loss_replay=2, grad_replay=4, switch=1)
    profile = profile.model_copy(update={"workload": "small"})
    workload = workload_of(candidates=4, mini_batches=2)
    write_outputs(make_plan(workload, Cluster.equal(3, "gpu"), profile, None, ("one_batch",)), made / "plan")
    profile.save(made / "profile.json")
    (made / "workload.yaml").write_text(yaml.safe_dump(workload.model_dump(mode="json")))
    Cluster.equal(4, "gpu").save(made / "cluster.yaml")
    return made


def edited(source, target, change):
    """A copy of a JSON document, changed."""
    data = json.loads(source.read_text())
    change(data)
    target.write_text(json.dumps(data))
    return target


def refused(result, out="plan"):
    """Bad input: exit 2, one line, nothing on standard output, nothing written. Returns the line."""
    code, stdout, stderr = result
    assert (code, stdout) == (2, "")
    (line,) = stderr.splitlines()
    assert line.startswith("error: ")
    assert "Traceback" not in stderr
    assert out is None or not Path(out).exists()
    return line


# -- what it does -----------------------------------------------------------------------------------------------


def test_plan_writes_five_files_and_a_table(run, tmp_path):
    code, stdout, stderr = run(*SMALL, "--out", "deep/plan")
    assert (code, "Traceback" in stderr) == (0, False)
    assert sorted(path.name for path in (tmp_path / "deep/plan").iterdir()) == FILES
    assert all(name in stdout for name in SCHEDULES)
    assert "off-policy" in stdout
    assert "its speedup is over other mathematics" in stdout
    assert "dancegrpo-vrt on 2 GPUs" in stdout
    assert (tmp_path / "deep/plan/timeline.csv").read_text().splitlines()[0] == ",".join(COLUMNS)
    assert json.loads((tmp_path / "deep/plan/trace.json").read_text())
    assert Plan.load(tmp_path / "deep/plan/plan.json").best in SCHEDULES
    assert Certificate.load(tmp_path / "deep/plan/certificate.json").space_size == 5 * 3 * 3


def test_json_has_the_documented_keys(run):
    code, stdout, _ = run(*SMALL, "--scoring", "all", "--json")
    assert code == 0
    found = json.loads(stdout)
    assert set(found) == set(KEYS) | MORE["top"]
    assert set(found["best"]) == set(BEST_KEYS) | MORE["best"]
    assert list(found["schedules"]) == list(SCHEDULES)
    for row in found["schedules"].values():
        assert set(row) == set(SCHEDULE_KEYS) | MORE["schedules"]
    assert found["space_size"] == 3 * 5 * 3 * 3
    counted = found["simulated"] + found["evaluated"]
    assert found["space_size"] == counted + sum(found["pruned"].values()) + sum(found["infeasible"].values())
    assert (
        found["lower_bound_us"] <= found["best"]["step_us"] == found["schedules"][found["best"]["schedule"]]["step_us"]
    )
    assert found["gap"] == pytest.approx(found["best"]["step_us"] / found["lower_bound_us"] - 1)


def test_same_input_twice_gives_the_same_files(run, tmp_path):
    for name in ("one", "two"):
        assert run(*SMALL, "--out", name)[0] == 0
    for name in ("plan.json", "certificate.json", "timeline.csv", "trace.json"):
        assert (tmp_path / "one" / name).read_bytes() == (tmp_path / "two" / name).read_bytes(), name


def test_own_workload_profile_and_cluster_files(run, folder, tmp_path):
    workload, profile = folder / "workload.yaml", folder / "profile.json"
    assert run("--workload", workload, "--profile", profile, "--cluster", folder / "cluster.yaml")[0] == 0
    plan = Plan.load(tmp_path / "plan/plan.json")
    assert (plan.workload.name, plan.profile.name, len(plan.cluster.gpus)) == ("small", "round", 4)


def test_actors_and_rewards_fix_the_split(run, tmp_path):
    for n, options in enumerate(
        (("--actors", 3, "--rewards", 1), ("--gpus", 4, "--actors", 3), ("--gpus", 4, "--rewards", 1))
    ):
        assert run(*SMALL, *options, "--out", f"plan{n}")[0] == 0
        (region,) = Certificate.load(tmp_path / f"plan{n}/certificate.json").regions
        assert (region.actors, region.rewards) == (3, 1)


def test_profile_in_this_folder_is_taken_if_it_is_of_this_workload(run, folder, tmp_path):
    workload = folder / "workload.yaml"
    (tmp_path / "profile.json").write_bytes((folder / "profile.json").read_bytes())
    code, stdout, _ = run("--workload", workload)
    assert code == 0
    assert "(profile.json)" in stdout
    code, stdout, _ = run(*SMALL)
    assert code == 0
    assert "shipped profile" in stdout


def test_it_says_so_where_a_split_does_not_pay(run, folder, tmp_path):
    free = profile_of("dynamic", generate=10, loss_replay=5, grad_replay=20)
    free.save(tmp_path / "free.json")
    code, stdout, _ = run("--workload", folder / "workload.yaml", "--profile", "free.json", "--gpus", 2)
    assert code == 0
    assert "no benefit from training before the scores are in" in stdout
    assert "best: colocated_merged, all 2 GPUs in every role" in stdout


def test_as_a_program(tmp_path):
    """Through the interpreter: exit codes and streams are the process's own."""
    base = [sys.executable, "-m", "stagebreaker.placement"]
    good = subprocess.run([*base, *SMALL, "--json"], cwd=tmp_path, capture_output=True, text=True, timeout=120)
    assert good.returncode == 0, good.stderr
    assert json.loads(good.stdout)["space_size"] == 45
    bad = subprocess.run([*base, *SMALL, "--gpus", "1"], cwd=tmp_path, capture_output=True, text=True, timeout=120)
    assert (bad.returncode, bad.stdout) == (2, "")
    assert bad.stderr.splitlines() == ["error: gpus=1 must be at least 2: one actor and one reward GPU"]


# -- bad input ----------------------------------------------------------------------------------------------------


BAD = {
    "one GPU": (("--gpus", "1"), "gpus=1 must be at least 2"),
    "no GPU": (("--gpus", "0"), "gpus=0 must be at least 1"),
    "too few GPUs": (
        ("--actors", "4", "--rewards", "2", "--gpus", "4"),
        "needs 6 GPUs, the cluster has 4: missing 2",
    ),
    "too many GPUs": (("--actors", "4", "--rewards", "2", "--gpus", "8"), "make 6 GPUs, --gpus says 8"),
    "no actor": (("--gpus", "2", "--rewards", "2"), "--actors 0 and --rewards 2 must both be at least 1"),
    "unknown scoring": (("--scoring", "on_arival"), "--scoring 'on_arival' is unknown; did you mean 'on_arrival'?"),
    "unknown workload": (("--workload", "dancegrpo-vrd"), "did you mean 'dancegrpo-vrt'?"),
    "unknown profile": (("--profile", "provisional-kvpo-vrd"), "did you mean 'provisional-kvpo-vrt'?"),
    "unknown field": (("--set", "candidate=4"), "unknown key 'candidate'; did you mean 'candidates'?"),
    "field without a value": (("--set", "candidates"), "must be key=value"),
    "field out of range": (("--set", "mini_batches=9"), "mini_batches=9 must be in 1..4"),
    "no such file": (("--workload", "none.yaml"), "none.yaml: no such file"),
    "no such option": (("--gpu", "2"), "No such option: --gpu"),
    "not a number": (("--gpus", "two"), "Invalid value for '--gpus'"),
    "profile of another workload": (("--profile", "provisional-kvpo-vrt"), "profile that workload, or plan"),
    "space too large": (
        (
            "--workload",
            "kvpo-vrt",
            "--set",
            "candidates=24",
            "--set",
            "group_size=12",
            "--search",
            "exhaustive",
            "--gpus",
            "6",
        ),
        "3570125 of the space's 3570125 placements would be simulated, the limit is 200000",
    ),
    "gain below nothing": (("--min-gain", "-0.1"), "--min-gain -0.1 must be between 0 and 10"),
    "unknown search": (("--search", "bounds"), "--search 'bounds' is unknown; did you mean 'bound'?"),
}


@pytest.mark.parametrize("what", BAD)
def test_bad_options_end_in_one_line(run, what):
    options, message = BAD[what]
    assert message in refused(run(*SMALL, *options))


def test_cluster_smaller_than_the_split(run, folder):
    cluster = ("--cluster", folder / "cluster.yaml")
    line = refused(
        run(
            "--actors",
            4,
            "--rewards",
            2,
            *cluster,
            "--workload",
            folder / "workload.yaml",
            "--profile",
            folder / "profile.json",
        )
    )
    assert "needs 6 GPUs, the cluster has 4: missing 2" in line
    assert "give one of them" in refused(run(*SMALL, *cluster, "--gpus", 4))


def test_cluster_of_a_kind_that_was_not_profiled(run, folder):
    line = refused(run("--cluster", folder / "cluster.yaml", *SMALL))
    assert "on GPU kind 'gpu'" in line


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("name: [small\n", "workload.yaml:2: not YAML"),
        ("- 1\n- 2\n", "a workload is a mapping of fields, got list"),
        ("", "a workload is a mapping of fields, got NoneType"),
        ("schema_version: 9\n", "schema_version=9 of this workload is not 1"),
        ("{key}: 1\n", "unknown key 'grupsize'; did you mean 'group_size'?"),
    ],
)
def test_bad_workload_files(run, folder, tmp_path, text, message):
    whole = (folder / "workload.yaml").read_text()
    path = tmp_path / "workload.yaml"
    path.write_text(whole + text.format(key="grupsize") if "{key}" in text else text)
    assert message in refused(run("--workload", path))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda d: d["tasks"][0].update(samples_us=[-5]), "-5"),
        (lambda d: d["tasks"][0].update(samples_us=[]), "samples_us is empty"),
        (lambda d: d["tasks"][0].update(samples_us=[1.5]), "1.5"),
        (lambda d: d["tasks"][0].update(kind="generat"), "did you mean 'generate'?"),
        (lambda d: d.update(tasks=[t for t in d["tasks"] if t["kind"] != "grad_replay"]), "has no task 'grad_replay'"),
        (lambda d: d.update(tasks=[t for t in d["tasks"] if t["kind"] != "switch"]), "has no task 'switch'"),
        (lambda d: d["sizes_bytes"].pop("frames"), "has no sizes_bytes.frames"),
        (lambda d: d["link"].update(bytes_per_s=0), "bytes_per_s=0"),
        (lambda d: d.update(serving="eager"), "serving='eager'"),
        (lambda d: d.update(schema_version=2), "schema_version=2 of this profile is not 1"),
    ],
)
def test_bad_profile_files(run, folder, tmp_path, change, message):
    path = edited(folder / "profile.json", tmp_path / "p.json", change)
    assert message in refused(run("--workload", folder / "workload.yaml", "--profile", path))


def test_out_that_is_a_file(run, tmp_path):
    (tmp_path / "plan").write_text("mine")
    for out in ("plan", "plan/deeper"):
        assert "plan is a file; give a folder" in refused(run(*SMALL, "--out", out), out=None)
    assert (tmp_path / "plan").read_text() == "mine"


# -- verify, simulate, explain ------------------------------------------------------------------------------------


def test_verify_confirms_and_exits_1_where_it_cannot(run, folder, tmp_path):
    code, stdout, stderr = run("verify", folder / "plan/certificate.json")
    assert (code, stderr) == (0, "")
    assert stdout.startswith("confirmed: 90 placements")
    code, stdout, _ = run("verify", folder / "plan/certificate.json", "--json")
    assert (code, json.loads(stdout)) == (0, {"ok": True, "problems": []})
    tampered = edited(
        folder / "plan/certificate.json", tmp_path / "c.json", lambda d: d.update(step_us=d["step_us"] - 1)
    )
    code, stdout, stderr = run("verify", tampered)
    assert (code, stdout, len(stderr.splitlines())) == (1, "", 1)
    assert stderr.startswith("error: ")
    code, stdout, _ = run("verify", tampered, "--json")
    assert (code, json.loads(stdout)["ok"]) == (1, False)


def test_verify_refuses_what_is_no_certificate(run, folder):
    assert "unknown key 'workload_sha256'" in refused(run("verify", folder / "plan/plan.json"))
    assert "no such file" in refused(run("verify", "nothing.json"))


@pytest.mark.parametrize("schedule", [None, *SCHEDULES])
def test_simulate_takes_the_time_the_plan_says(run, folder, schedule):
    options = ("--schedule", schedule) if schedule else ()
    code, stdout, stderr = run("simulate", folder / "plan/plan.json", "--json", *options)
    assert (code, stderr) == (0, "")
    found, plan = json.loads(stdout), Plan.load(folder / "plan/plan.json")
    assert found["schedule"] == (schedule or plan.best)
    assert found["step_us"] == plan.schedules[found["schedule"]].step_us
    for lane in found["lanes"]:
        assert lane["busy_us"] + lane["overhead_us"] + sum(lane["idle_us"].values()) == found["step_us"]


def test_simulate_prints_a_table_and_writes_the_timeline(run, folder, tmp_path):
    code, stdout, _ = run("simulate", folder / "plan/plan.json", "--out", "again.csv")
    assert code == 0
    assert "step" in stdout
    assert (tmp_path / "again.csv").read_bytes() == (folder / "plan/timeline.csv").read_bytes()


def test_simulate_an_edited_plan(run, folder, tmp_path):
    def shorter(plan):
        plan["schedules"]["stagebreaker"]["step_us"] -= 1

    path = edited(folder / "plan/plan.json", tmp_path / "p.json", shorter)
    code, stdout, stderr = run("simulate", path, "--schedule", "stagebreaker")
    assert (code, stdout, len(stderr.splitlines())) == (1, "", 1)
    assert "the plan says" in stderr
    assert run("simulate", path, "--schedule", "colocated")[0] == 0


def _move_too_many(plan):
    plan["schedules"]["stagebreaker"]["placement"]["vae_moved"] = 25


def _swap_order(plan):
    queue = plan["schedules"]["stagebreaker"]["order"]["actor0"]
    queue[0], queue[1] = queue[1], queue[0]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (_move_too_many, "vae_moved=25 must be in 0..4 (batch of 4 candidates)"),
        (_swap_order, "the plan's task lists are not those of its placement"),
        (lambda d: d.update(schema_version=7), "schema_version=7 of this plan is not 1"),
        (lambda d: d.update(bst="x"), "unknown key 'bst'; did you mean 'best'?"),
        (lambda d: d.pop("profile"), "profile is missing; add it"),
        (lambda d: d["cluster"].update(gpus=d["cluster"]["gpus"][:1]), "needs 3 GPUs, the cluster has 1: missing 2"),
    ],
)
@pytest.mark.parametrize("action", ["simulate", "explain"])
def test_bad_plans(run, folder, tmp_path, action, change, message):
    path = edited(folder / "plan/plan.json", tmp_path / "p.json", change)
    assert message in refused(run(action, path, "--schedule", "stagebreaker"))


def test_moved_decodes_of_a_published_batch(run, folder, tmp_path):
    def published(plan):
        plan["workload"].update(candidates=24, group_size=12)
        plan["schedules"]["stagebreaker"]["placement"].update(vae_moved=25)

    path = edited(folder / "plan/plan.json", tmp_path / "p.json", published)
    line = refused(run("simulate", path, "--schedule", "stagebreaker"))
    assert "vae_moved=25 must be in 0..24 (batch of 24 candidates)" in line


def test_a_plan_cut_off_in_the_middle(run, folder, tmp_path):
    text = (folder / "plan/plan.json").read_text()
    (tmp_path / "p.json").write_text(text[: len(text) // 2])
    assert "not JSON" in refused(run("simulate", "p.json"))


def test_unknown_schedule_of_a_plan(run, folder):
    for action in ("simulate", "explain"):
        line = refused(run(action, folder / "plan/plan.json", "--schedule", "stagebraker"))
        assert "did you mean 'stagebreaker'?" in line


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_explain_names_every_gpu_and_what_binds(run, folder, schedule):
    code, stdout, stderr = run("explain", folder / "plan/plan.json", "--schedule", schedule)
    assert (code, stderr) == (0, "")
    plan = Plan.load(folder / "plan/plan.json")
    p = plan.schedules[schedule].placement
    apart = [f"actor{n}" for n in range(p.actors)] + [f"reward{n}" for n in range(p.rewards)]
    lanes = [f"gpu{n}" for n in range(3)] if SCHEDULES[schedule].everywhere else apart
    assert len(lanes) == 3
    for lane in lanes:
        assert lane in stdout
    assert "binds" in stdout
    assert "generate" in stdout
    (line,) = [line for line in stdout.splitlines() if line.startswith("Critical path: ")]
    kinds = by_kind(critical_path(*replay(plan, schedule)))
    longest = next(iter(kinds))
    assert line.startswith(f"Critical path: {longest} {100 * kinds[longest] / plan.schedules[schedule].step_us:.0f} %")


def test_help_names_every_option(run):
    code, stdout, _ = run("--help")
    assert code == 0
    for option in (
        "--workload",
        "--profile",
        "--gpus",
        "--cluster",
        "--actors",
        "--scoring",
        "--set",
        "--out",
        "--json",
    ):
        assert option in stdout


def test_default_profile_is_looked_up_by_name():
    profile, origin = command.find_profile(None, "dancegrpo-vrt", "provisional-dancegrpo-vrt")
    assert (profile.name, origin) == ("provisional-dancegrpo-vrt", "shipped profile provisional-dancegrpo-vrt")
    with pytest.raises(InputError, match="run stagebreaker-profile"):
        command.find_profile(None, "mine", None)


def test_version_is_one_line(run):
    code, out, err = run("--version")
    assert (code, err) == (0, "")
    assert out.startswith("stagebreaker 0.")
    assert len(out.splitlines()) == 1


def test_explain_and_diff_speak_json_too(run, folder):
    code, out, _ = run("explain", folder / "plan/plan.json", "--json")
    found = json.loads(out)
    assert (code, found["schedule"]) == (0, Plan.load(folder / "plan/plan.json").best)
    assert {"step_us", "gpus", "binds", "critical_path_us", "one_change", "memory"} <= set(found)
    assert run("diff", folder / "plan/plan.json", folder / "plan/plan.json")[1] == "the plans are alike\n"
    assert json.loads(run("diff", folder / "plan/plan.json", folder / "plan/plan.json", "--json")[1]) == []
    assert "no such file" in refused(run("diff", folder / "plan/plan.json", "none.json"))
