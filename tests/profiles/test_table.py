"""Profiles: medians, curves, links, refusals, and what ships."""

from importlib import resources

import pytest
from builders import profile_of

from stagebreaker.profiles.document import InputError
from stagebreaker.profiles.table import TASK_KINDS, LinkCost, Profile, TaskCost

SHIPPED = sorted(f.name for f in resources.files("stagebreaker.profiles.data").iterdir() if f.name.endswith(".json"))


def parsed(**changes):
    return Profile.parse(profile_of(generate=1).model_dump(mode="json") | changes, "profile p.json")


def cost(**fields):
    return {"kind": "generate", "gpu_kind": "gpu", "samples_us": [3, 1, 2]} | fields


# -- what ships --------------------------------------------------------------------------------------


def test_something_ships():
    assert {"provisional-dancegrpo-vrt.json", "provisional-kvpo-vrt.json"} <= set(SHIPPED)


@pytest.mark.parametrize("name", SHIPPED)
def test_shipped_profile_survives_a_round_trip(name, tmp_path):
    text = (resources.files("stagebreaker.profiles.data") / name).read_text("utf-8")
    (tmp_path / name).write_text(text, encoding="utf-8")
    profile = Profile.load(tmp_path / name)
    assert profile.name == name.removesuffix(".json")
    assert profile.source
    profile.save(tmp_path / "again.json")
    assert Profile.load(tmp_path / "again.json") == profile
    assert (tmp_path / "again.json").read_text("utf-8") == profile.to_json() == text


@pytest.mark.parametrize("name", [name for name in SHIPPED if name.startswith("provisional")])
def test_provisional_profiles_say_so_and_know_every_task(name):
    profile = Profile.model_validate_json((resources.files("stagebreaker.profiles.data") / name).read_text("utf-8"))
    assert profile.provenance == "provisional"
    for kind in TASK_KINDS:
        assert profile.has(kind, profile.gpu_kinds[0].name), kind


# -- reading costs -----------------------------------------------------------------------------------


def test_planning_uses_the_median():
    assert TaskCost(kind="fold", gpu_kind="g", samples_us=(9, 1, 2)).median_us == 2
    assert TaskCost(kind="fold", gpu_kind="g", samples_us=(1, 2)).median_us == 1


def test_spread_is_the_interquartile_range_over_the_median():
    assert TaskCost(kind="fold", gpu_kind="g", samples_us=(5,)).spread == 0
    assert TaskCost(kind="fold", gpu_kind="g", samples_us=(0, 0, 0)).spread == 0
    assert TaskCost(kind="fold", gpu_kind="g", samples_us=(10, 20, 30, 40, 50)).spread == pytest.approx(20 / 30)


def test_curves_ascend_and_interpolate():
    profile = parsed(tasks=[cost(kind="score", batch_size=b, samples_us=[b * b]) for b in (8, 2)])
    assert profile.curve_us("score", "gpu") == {2: 4, 8: 64}
    assert profile.duration_us("score", "gpu", 5) == 34
    with pytest.raises(InputError, match=r"batch size 9 of score on gpu .* outside the measured 2\.\.8"):
        profile.duration_us("score", "gpu", 9)


def test_gpu_kinds_are_kept_apart():
    kinds = [{"name": "fast", "model": "f"}, {"name": "slow", "model": "s"}]
    tasks = [cost(gpu_kind="fast", samples_us=[1]), cost(gpu_kind="slow", samples_us=[7])]
    profile = parsed(gpu_kinds=kinds, tasks=tasks)
    assert [profile.duration_us("generate", kind) for kind in ("fast", "slow")] == [1, 7]


def test_an_absent_task_is_named_with_what_there_is():
    profile = parsed(tasks=[cost(), cost(kind="fold")])
    assert not profile.has("update", "gpu")
    with pytest.raises(InputError, match="no task 'update' on GPU kind 'gpu'; it has fold, generate; profile it"):
        profile.duration_us("update", "gpu")


def test_an_absent_size_is_an_error_and_not_zero():
    with pytest.raises(InputError, match=r"no sizes_bytes\.frames; it has adapter; add it"):
        parsed(sizes_bytes={"adapter": 1}).size_bytes("frames")


def test_memory_that_is_not_known_is_not_written_and_changes_no_hash():
    known = parsed(memory_bytes={"kv_cache": 7})
    assert known.held_bytes("kv_cache") == 7
    assert '"memory_bytes": {\n    "kv_cache": 7' in known.to_json()
    assert 'memory_bytes": {' not in parsed().to_json()
    assert parsed().digest() == parsed(memory_bytes={}).digest() != known.digest()
    with pytest.raises(InputError, match=r"no memory_bytes\.adapter; it has kv_cache; add it"):
        known.held_bytes("adapter")


@pytest.mark.parametrize(
    ("latency_us", "bytes_per_s", "size", "us"),
    [
        (0, 10_000_000_000, 350_000_000, 35_000),
        (20, 10_000_000_000, 350_000_000, 35_020),
        (0, 3_000_000, 1, 1),
        (0, 3_000_000, 3, 1),
        (0, 3_000_000, 4, 2),
        (7, 1, 0, 7),
    ],
)
def test_link_rounds_up_to_whole_microseconds(latency_us, bytes_per_s, size, us):
    assert LinkCost(latency_us=latency_us, bytes_per_s=bytes_per_s).duration_us(size) == us


# -- refusals ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"tasks": [cost(samples_us=[5, -1])]}, r"tasks\.0\.samples_us\.1=-1"),
        ({"tasks": [cost(samples_us=[])]}, "samples_us is empty"),
        ({"tasks": [cost(samples_us=[1.5])]}, r"tasks\.0\.samples_us\.0=1\.5"),
        ({"tasks": [cost(kind="vae_decod")]}, "no task kind; did you mean 'vae_decode'"),
        ({"tasks": [cost(gpu_kind="gpv")]}, "gpu_kind='gpv'; did you mean 'gpu'"),
        ({"tasks": [cost(), cost()]}, "task generate on gpu at batch 1 stands twice"),
        ({"tasks": [cost(batch_size=0)]}, r"tasks\.0\.batch_size=0"),
        ({"tasks": [cost(sample_us=[1])]}, r"unknown key 'tasks\.0\.sample_us'; did you mean 'samples_us'"),
        ({"sizes_bytes": {"latent": 1}}, "no data kind; did you mean 'latents'"),
        ({"memory_bytes": {"kv_cash": 1}}, "no memory kind; did you mean 'kv_cache'"),
        ({"memory_bytes": {"kv_cache": -1}}, r"memory_bytes\.kv_cache=-1"),
        ({"sizes_bytes": {"latents": -1}}, r"sizes_bytes\.latents=-1"),
        ({"link": {"bytes_per_s": 0}}, r"link\.bytes_per_s=0"),
        (
            {"link": {"bytes_per_s": 1, "latncy_us": 2}},
            r"unknown key 'link\.latncy_us'; did you mean 'latency_us'",
        ),
        ({"gpu_kinds": []}, "gpu_kinds is empty"),
        ({"gpu_kinds": [{"name": "gpu", "model": "a"}] * 2}, "gpu_kinds names a kind twice"),
        ({"serving": "parallel"}, "serving='parallel'"),
        ({"provenance": "guessed"}, "provenance='guessed'"),
        ({"schema_version": 7}, "schema_version=7 of this profile is not 1"),
        ({"servin": "serial"}, "unknown key 'servin'; did you mean 'serving'"),
    ],
)
def test_bad_profiles_are_refused(changes, message):
    with pytest.raises(InputError, match=message) as error:
        parsed(**changes)
    assert "\n" not in str(error.value)
    assert str(error.value).startswith("profile p.json: ")
