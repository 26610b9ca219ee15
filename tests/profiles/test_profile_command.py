"""stagebreaker-profile without an engine: comparing profiles, and one line for every bad input."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
from builders import profile_of

from stagebreaker.profiles import __main__ as command
from stagebreaker.profiles.table import TASK_KINDS, Profile, TaskCost


@pytest.fixture
def run(monkeypatch, capsys, tmp_path):
    """Run the command in an empty folder: (exit code, standard output, standard error)."""
    monkeypatch.chdir(tmp_path)

    def call(*arguments):
        capsys.readouterr()
        monkeypatch.setattr(sys, "argv", ["stagebreaker-profile", *map(str, arguments)])
        try:
            command.main()
            code = 0
        except SystemExit as done:
            code = done.code
        return code, *capsys.readouterr()

    return call


def refused(result):
    """Bad input: exit 2, one line, nothing on standard output, nothing written. Returns the line."""
    code, stdout, stderr = result
    assert (code, stdout) == (2, "")
    (line,) = stderr.splitlines()
    assert line.startswith("error: ")
    assert not Path("profile.json").exists()
    return line


@pytest.fixture
def two(tmp_path):
    """Two profiles: the second rolls out twice as fast, has no switch and one more batch of scores."""
    first = profile_of(generate=10, t1=3, switch=1)
    second = profile_of(generate=5, t1=3)
    tasks = [task for task in second.tasks if task.kind != "switch"]
    tasks.append(TaskCost(kind="score", gpu_kind="gpu", batch_size=8, samples_us=(20_000_000, 22_000_000, 40_000_000)))
    first.save(tmp_path / "a.json")
    second.model_copy(update={"tasks": tuple(tasks)}).save(tmp_path / "b.json")
    return tmp_path / "a.json", tmp_path / "b.json"


def test_compare_prints_ratios_and_what_is_in_one_of_them_only(run, two):
    code, stdout, stderr = run("compare", *two)
    assert (code, stderr) == (0, "")
    line = next(line for line in stdout.splitlines() if "generate" in line)
    assert "10.0 s" in line
    assert "5.000 s" in line
    assert "0.500x" in line
    assert "in one of them only: score on gpu at batch 8, switch on gpu at batch 1" in stdout


def test_compare_as_json(run, two):
    code, stdout, _ = run("compare", *two, "--json")
    assert code == 0
    found = json.loads(stdout)
    assert list(found) == ["tasks", "only_in_one"]
    assert found["only_in_one"] == ["score on gpu at batch 8", "switch on gpu at batch 1"]
    rows = {(row["kind"], row["batch_size"]): row for row in found["tasks"]}
    assert len(rows) == len(TASK_KINDS) + 1 - 1  # two sizes of score, no switch
    assert rows["generate", 1] == {
        "kind": "generate",
        "gpu_kind": "gpu",
        "batch_size": 1,
        "first_us": 10_000_000,
        "second_us": 5_000_000,
        "ratio": 0.5,
    }
    assert rows["score", 64]["ratio"] == 1.0
    assert rows["fold", 1]["ratio"] is None  # nothing over nothing


def test_a_profile_equals_itself(run, two):
    code, stdout, _ = run("compare", two[0], two[0], "--json")
    found = json.loads(stdout)
    assert (code, found["only_in_one"]) == (0, [])
    assert all(row["ratio"] in (None, 1.0) for row in found["tasks"])


def test_compare_refuses_what_is_no_profile(run, two, tmp_path):
    assert "none.json: no such file" in refused(run("compare", two[0], "none.json"))
    (tmp_path / "half.json").write_text(two[0].read_text()[:200])
    assert "half.json" in refused(run("compare", two[0], "half.json"))
    (tmp_path / "old.json").write_text(json.dumps(json.loads(two[0].read_text()) | {"schema_version": 0}))
    assert "schema_version=0 of this profile is not 1" in refused(run("compare", "old.json", two[1]))
    refused(run("compare", two[0]))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--workload", "tiny-dancegrp"), "did you mean 'tiny-dancegrpo'?"),
        (("--workload", "none.yaml"), "none.yaml: no such file"),
        (("--set", "candidate=4"), "unknown key 'candidate'; did you mean 'candidates'?"),
        (("--set", "trained_steps=9"), "trained_steps=9 must be in 1..3"),
        (("--repeats", "0"), "--repeats 0 must be at least 1"),
        (("--repeats", "many"), "--repeats"),
        (("--out", "."), "--out . is a folder; give a file"),
        (("--out", "file/profile.json"), "is a file; give a folder"),
        (("--frobnicate",), "No such option"),
    ],
)
def test_bad_options_end_in_one_line_before_any_engine_is_loaded(run, tmp_path, monkeypatch, options, message):
    monkeypatch.setitem(sys.modules, "stagebreaker.executor.device", None)
    (tmp_path / "file").write_text("mine")
    assert message in refused(run(*options))


def test_without_the_engines_it_says_what_to_install(tmp_path):
    code = (
        "import sys; sys.modules['torch'] = None; sys.argv = ['stagebreaker-profile']\n"
        "from stagebreaker.profiles.__main__ import main; main()"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stdout) == (2, "")
    (line,) = done.stderr.splitlines()
    assert line.startswith("error: ")
    assert "engines and torch is not installed; pip install 'stagebreaker[run]'" in line
    assert not list(tmp_path.iterdir())


def test_predict_writes_a_profile_that_says_so(run):
    code, stdout, _ = run("predict", "--hardware", "h100-80gb", "--json")
    assert (code, json.loads(stdout)["provenance"]) == (0, "predicted")
    profile = Profile.load(Path("profile.json"))
    assert (profile.provenance, profile.settings["resolution"]) == ("predicted", "480x832")


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("--hardware", "h10"), "did you mean 'h100-80gb'?"),
        (("--workload", "tiny-dancegrpo"), "policy 'tiny' has no known dimensions"),
    ],
)
def test_predict_refuses_what_it_does_not_know(run, arguments, said):
    assert said in refused(run("predict", *arguments))
