"""Workload and Cluster: numbering, refusals that say how to mend them, overrides, files."""

import json

import pytest
from builders import workload_of
from hypothesis import given, settings
from strategies import workloads

from stagebreaker.profiles.document import InputError
from stagebreaker.sim.workload import Cluster, Workload, load_workload, parse_overrides, shipped_workloads


def test_shipped_workloads():
    assert shipped_workloads() == [
        "dancegrpo-urflex",
        "dancegrpo-vrt",
        "kvpo-urflex",
        "kvpo-vrt",
        "tiny-dancegrpo",
    ]


@pytest.mark.parametrize("name", shipped_workloads())
def test_shipped_workload_survives_a_round_trip(name, tmp_path):
    workload = load_workload(name)
    assert workload.name == name
    workload.save(tmp_path / "workload.json")
    assert Workload.load(tmp_path / "workload.json") == workload
    assert load_workload(str(tmp_path / "workload.json")) == workload
    assert load_workload(str(tmp_path / "workload.json")).to_json() == workload.to_json()


@settings(deadline=None)
@given(workloads())
def test_any_workload_survives_a_round_trip(workload):
    assert Workload.model_validate_json(workload.to_json()) == workload
    assert Workload.model_validate_json(workload.to_json()).digest() == workload.digest()


@settings(deadline=None)
@given(workloads())
def test_mini_batches_and_groups_divide_the_candidates(workload):
    everyone = list(range(workload.candidates))
    batches = [list(workload.mini_batch_members(m)) for m in range(workload.mini_batches)]
    assert [i for batch in batches for i in batch] == everyone
    assert len(batches[0]) - len(batches[-1]) in (0, 1)
    assert [i for g in range(workload.groups) for i in workload.group_members(g)] == everyone
    assert all(i in workload.mini_batch_members(workload.mini_batch_of(i)) for i in everyone)
    assert all(i in workload.group_members(workload.group_of(i)) for i in everyone)


def test_uneven_mini_batches_put_the_larger_first():
    workload = workload_of(candidates=8, group_size=2, mini_batches=3)
    assert [list(workload.mini_batch_members(m)) for m in range(3)] == [[0, 1, 2], [3, 4, 5], [6, 7]]


@pytest.mark.parametrize(
    ("given_", "pixels", "latent"),
    [("480p", "480x832", (60, 104)), ("360p", "352x640", (44, 80)), ("64x96", "64x96", (8, 12))],
)
def test_resolution(given_, pixels, latent):
    workload = workload_of(resolution=given_)
    assert workload.latent_size == latent
    height, width = pixels.split("x")
    assert workload.latent_size == (int(height) // 8, int(width) // 8)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"candidates": 5}, "candidates=5 must be a multiple of group_size=2"),
        ({"group_size": 1}, "group_size=1 must be at least 2"),
        ({"mini_batches": 3}, r"mini_batches=3 must be in 1\.\.2 \(candidates=2\)"),
        ({"latent_frames": 8}, "latent_frames=8 must be a multiple of chunk_frames=3"),
        (
            {"trained_steps": 4},
            r"trained_steps=4 must be in 1\.\.3 \(denoise_steps=4; the last step is deterministic",
        ),
        ({"resolution": "480q"}, "resolution='480q' must be HxW in pixels"),
        ({"resolution": "481x832"}, "multiples of 8"),
        ({"algorithm": "kvpo"}, "reward_shape='pointwise' must be 'anchor' for KVPO"),
        ({"algorithm": "ppo"}, "algorithm='ppo': input should be 'dancegrpo', 'flow_grpo' or 'kvpo'"),
        ({"candidates": 0}, "candidates=0"),
        ({"candidates": "2"}, "candidates='2': input should be a valid integer"),
        ({"candidates": True}, "candidates=True"),
        ({"clip_low": 0.0}, "clip_low=0.0"),
        ({"learning_rate": float("nan")}, "learning_rate"),
        ({"learning_rate": float("inf")}, "learning_rate"),
        ({"seed": -1}, "seed=-1"),
    ],
)
def test_bad_workloads_are_refused(fields, message):
    with pytest.raises(InputError, match=message) as error:
        workload_of(**fields)
    assert "\n" not in str(error.value)


def test_unknown_key_names_the_nearest():
    with pytest.raises(InputError, match="unknown key 'group_sise'; did you mean 'group_size'"):
        workload_of(group_sise=2)


def test_missing_key_is_named():
    with pytest.raises(InputError, match="judge is missing; add it"):
        Workload.parse({k: v for k, v in workload_of().model_dump(mode="json").items() if k != "judge"}, "w")


def test_unknown_workload_names_the_nearest():
    with pytest.raises(InputError, match="did you mean 'dancegrpo-vrt'"):
        load_workload("dancegrpo-vtr")


# -- overrides ---------------------------------------------------------------------------------------


def test_overrides_are_read_as_yaml_numbers():
    workload = load_workload(
        "tiny-dancegrpo", ("candidates=4", "clip_low=1e-4", "learning_rate=2E-5", "lora_targets=[to_q, to_k]")
    )
    assert (workload.candidates, workload.clip_low, workload.learning_rate) == (4, 1e-4, 2e-5)
    assert workload.lora_targets == ("to_q", "to_k")


def test_a_small_number_in_a_file_is_a_number(tmp_path):
    fields = workload_of().model_dump(mode="json") | {"clip_low": "?"}
    text = "\n".join(f"{key}: {json.dumps(value)}" for key, value in fields.items())
    (tmp_path / "w.yaml").write_text(text.replace('"?"', "1e-4"))
    assert Workload.load(tmp_path / "w.yaml").clip_low == 1e-4


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("candidate=4", "unknown key 'candidate'; did you mean 'candidates'"),
        ("candidates", "must be key=value"),
        ("lora_targets=[a", "the value is not YAML"),
        ("candidates=four", "candidates='four': input should be a valid integer"),
        ("learning_rate=.nan", "learning_rate"),
    ],
)
def test_bad_overrides_are_refused(override, message):
    with pytest.raises(InputError, match=message):
        load_workload("tiny-dancegrpo", (override,))


def test_the_last_override_of_a_key_holds():
    assert parse_overrides(("seed=1", "seed=2")) == {"seed": 2}


def test_changed_copy_is_validated():
    assert workload_of().with_(seed=3).seed == 3
    with pytest.raises(InputError, match="must be a multiple"):
        workload_of().with_(candidates=3)


# -- clusters ----------------------------------------------------------------------------------------


def test_equal_cluster_round_trip(tmp_path):
    cluster = Cluster.equal(3, "gpu", 5)
    assert [gpu.name for gpu in cluster.gpus] == ["gpu0", "gpu1", "gpu2"]
    cluster.save(tmp_path / "cluster.json")
    assert Cluster.load(tmp_path / "cluster.json") == cluster


@pytest.mark.parametrize(
    ("gpus", "message"),
    [
        ([], "gpus is empty"),
        ([{"name": "a", "kind": "x"}, {"name": "a", "kind": "x"}], "names a GPU twice"),
        ([{"name": "a", "kind": "x", "nod": "n"}], r"unknown key 'gpus\.0\.nod'; did you mean 'node'"),
    ],
)
def test_bad_clusters_are_refused(gpus, message):
    with pytest.raises(InputError, match=message):
        Cluster.parse({"gpus": gpus}, "cluster")


def test_a_cluster_of_no_gpus_is_refused():
    with pytest.raises(InputError, match="gpus=0 must be at least 1"):
        Cluster.equal(0, "gpu")
