"""Predictions beyond the fitted point, and the table of them in docs."""

import io
import json
import sys
from dataclasses import replace
from pathlib import Path

import pandas as pd
import pytest

from stagebreaker.placement import predictions
from stagebreaker.placement.__main__ import main
from stagebreaker.placement.predictions import (
    COLUMNS,
    COMPARED,
    LARGE,
    Setting,
    all_settings,
    frame,
    of_sweep,
    predict,
    refusal,
    refused,
    scaled_profile,
    steps_us,
    summary,
    sweeps,
    to_csv,
)
from stagebreaker.placement.reproduce import best_placement
from stagebreaker.profiles.document import InputError
from stagebreaker.profiles.roofline import hardware_table
from stagebreaker.profiles.table import TASK_KINDS
from stagebreaker.sim.published import PAIRS, Case, shipped_profile, steps_of
from stagebreaker.sim.workload import load_workload

CSV = Path(__file__).parents[2] / "docs/predictions.csv"
FITTED = {pair: shipped_profile(f"fitted-{pair}") for pair in PAIRS}
KEYS = list(COLUMNS[:6])


def scaled(pair, **changes):
    setting = replace(Setting.default(pair), **changes)
    return scaled_profile(FITTED[pair], load_workload(pair), setting.workload("stagebreaker"))


def duration(profile, kind, batch=1):
    return profile.duration_us(kind, profile.gpu_kinds[0].name, batch)


def factor(kind, batch=1, pair="dancegrpo-vrt", **changes):
    return duration(scaled(pair, **changes), kind, batch) / duration(FITTED[pair], kind, batch)


@pytest.fixture(scope="module")
def table():
    return pd.read_csv(CSV)


# -- at the fitted point nothing changes -----------------------------------------------------------------------


@pytest.mark.parametrize("pair", PAIRS)
def test_at_the_default_every_duration_and_size_is_the_fitted_one(pair):
    found = scaled(pair)
    for kind in TASK_KINDS:
        for batch in range(1, 65) if kind == "score" else (1,):
            assert duration(found, kind, batch) == duration(FITTED[pair], kind, batch)
    assert found.sizes_bytes == FITTED[pair].sizes_bytes
    assert found.link == FITTED[pair].link


@pytest.mark.parametrize(("pair", "candidates"), [("dancegrpo-urflex", 12), ("dancegrpo-vrt", 24), ("kvpo-vrt", 12)])
def test_at_the_fitted_point_the_prediction_is_what_reproduce_simulates(pair, candidates, table):
    case, profile = Case(pair, candidates), FITTED[pair]
    known = {name: steps.makespan_us for name, steps in steps_of(case, best_placement(case, profile), profile).items()}
    setting = replace(Setting.default(pair), candidates=candidates)
    found = steps_us(setting)
    assert {name: found[name] for name in known} == known
    rows = frame([vars(setting)])[KEYS].merge(table, on=KEYS)
    assert dict(zip(rows["schedule"], rows["step_us"], strict=True)) == found
    assert list(found) == list(COMPARED)


# -- what scales ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("pair", PAIRS)
def test_rollout_grows_faster_than_video_length_and_decoding_by_equal_steps(pair):
    at = {frames: scaled(pair, latent_frames=frames) for frames in (21, 33, 45)}
    for kind in ("generate", "grad_replay", "old_replay"):
        short, middle, long = (duration(at[frames], kind) for frames in (21, 33, 45))
        assert middle / short > 33 / 21
        assert long / middle > 45 / 33
    first, second = (duration(at[b], "vae_decode") - duration(at[a], "vae_decode") for a, b in ((21, 33), (33, 45)))
    assert first == pytest.approx(second, abs=2)
    assert duration(at[45], "score", 6) == duration(at[21], "score", 6)  # the judge sees as many frames as before


@pytest.mark.parametrize("pair", PAIRS)
def test_fewer_pixels_cost_less(pair):
    kinds = ("generate", "vae_decode", "loss_replay", "old_replay", "ref_replay", "grad_replay", "context_rebuild")
    for kind in kinds:
        assert factor(kind, pair=pair, resolution="360p") < 352 * 640 / (480 * 832) + 0.01
    scores = [factor("score", batch, pair, resolution="360p") for batch in (1, 6, 12)]
    assert 1 > scores[0] > scores[1] > scores[2] > 0.7  # each request's prompt shrinks, reading the weights does not
    for kind in ("update", "switch", "encode_prompt"):
        assert factor(kind, pair=pair, resolution="360p") == 1


def test_a_larger_model_moves_more_weights_and_fewer_tokens():
    assert 1.3 < factor("switch", policy=LARGE) < 1.5
    assert factor("vae_decode", policy=LARGE) == pytest.approx((9.1 + 20 * 29.4) / (4.35 + 20 * 13.55), rel=1e-4)
    assert factor("generate", policy=LARGE) < 1  # 390 tokens a latent frame where the 1.3B model has 1560
    assert factor("score", 6, policy=LARGE) == 1
    assert (
        scaled("dancegrpo-vrt", policy=LARGE).sizes_bytes["gradient"]
        == 2 * FITTED["dancegrpo-vrt"].sizes_bytes["gradient"]
    )


def test_the_frameworks_share_of_an_update_stays():
    small, large = FITTED["kvpo-vrt"], scaled("kvpo-vrt", policy=LARGE)
    more = (large.sizes_bytes["adapter"] - small.sizes_bytes["adapter"]) * 8  # eight passes over fp32 parameters
    bandwidth = hardware_table().find(small.gpu_kinds[0].name).bandwidth
    assert duration(large, "update") - duration(small, "update") == pytest.approx(more / bandwidth * 1e6, rel=1e-2)


def test_a_large_policy_brings_its_own_window_and_vae():
    workload = replace(Setting.default("kvpo-vrt"), policy=LARGE).workload("stagebreaker")
    assert (workload.window_frames, workload.sink_frames, workload.vae) == (32, 8, "wan2.2")
    assert (workload.chunk_frames, workload.lora_rank) == (3, 256)


def test_a_scaled_profile_says_that_it_is_predicted_and_from_what():
    found = scaled("dancegrpo-vrt", resolution="360p")
    assert found.provenance == "predicted"
    assert found.source.startswith("fitted, scaled by roofline to wan2.1-1.3b-self-forcing, 21 latent frames, 352x640.")
    replace(Setting.default("dancegrpo-vrt"), resolution="360p").workload("stagebreaker").check_profile(found)


def test_what_cannot_be_scaled_is_refused():
    profile, base = FITTED["dancegrpo-vrt"], load_workload("dancegrpo-vrt")
    with pytest.raises(InputError, match="latent_frames=21"):
        scaled_profile(profile, base.with_(latent_frames=33), base)
    kind = profile.gpu_kinds[0].model_copy(update={"name": "other"})
    elsewhere = profile.model_copy(update={"gpu_kinds": (kind,)})
    with pytest.raises(InputError, match="'other' is not in the table"):
        scaled_profile(elsewhere, base, base)
    with pytest.raises(InputError, match="has 2 kinds of GPU"):
        scaled_profile(profile.model_copy(update={"gpu_kinds": (*profile.gpu_kinds, kind)}), base, base)


# -- settings and the table --------------------------------------------------------------------------------------


def test_old_log_probabilities_are_recomputed_where_training_waits_for_the_scores():
    setting = Setting.default("dancegrpo-vrt")
    sources = {name: setting.workload(name).old_logprob_source for name in COMPARED}
    assert {name for name, source in sources.items() if source == "recompute"} == {
        "colocated", "async_reward", "colocated_merged", "async_reward_merged",
    }  # fmt: skip


def test_every_setting_of_the_sweeps_is_there():
    found = {sweep: {(s.pair, getattr(s, sweep)) for s in settings} for sweep, settings in sweeps().items()}
    for sweep, values in (
        ("latent_frames", (21, 33, 45)),
        ("candidates", (6, 12, 24)),
        ("resolution", ("360p", "480p")),
    ):
        assert found[sweep] == {(pair, value) for pair in PAIRS for value in values}
    dance, kvpo = PAIRS[:2], PAIRS[2:]
    legal = {(pair, m) for pair in dance for m in (1, 2, 3, 4, 6)} | {(pair, m) for pair in kvpo for m in (1, 2)}
    assert found["mini_batches"] == legal
    assert found["policy"] == {(pair, p) for pair in PAIRS for p in (Setting.default(pair).policy, LARGE)}
    assert {s.candidates for s in sweeps()["mini_batches"] if s.pair in dance} == {24}


def test_kvpo_mini_batches_that_split_a_group_are_refused_by_name():
    assert {(one.pair, one.mini_batches) for one in refused()} == {(pair, m) for pair in PAIRS[2:] for m in (3, 4, 6)}
    assert all("a KVPO group may not be split" in why for why in refused().values())
    assert refusal(Setting.default("kvpo-vrt")) is None


def test_the_table_has_each_setting_and_schedule_once(table):
    assert tuple(table.columns) == COLUMNS
    assert not table.duplicated([*KEYS, "schedule"]).any()
    wanted = {(*vars(setting).values(), name) for setting in all_settings() for name in COMPARED}
    assert set(table[[*KEYS, "schedule"]].itertuples(index=False, name=None)) == wanted
    assert (table.loc[table["schedule"] == "colocated", "speedup_vs_colocated"] == 1).all()


def test_the_table_is_what_the_code_predicts(table):
    settings = [
        replace(Setting.default("dancegrpo-urflex"), candidates=6),
        replace(Setting.default("dancegrpo-vrt"), resolution="360p"),
        replace(Setting.default("kvpo-urflex"), mini_batches=1),
    ]
    fresh = pd.read_csv(io.StringIO(to_csv(frame(predict([*settings, settings[0]])))))
    kept = frame(map(vars, settings))[KEYS].merge(table, on=KEYS)
    pd.testing.assert_frame_equal(fresh, kept)


def test_a_sweep_of_the_table_and_its_range(table):
    rows = of_sweep(table, "resolution")
    assert len(rows) == 2 * len(PAIRS) * len(COMPARED)
    assert set(rows["candidates"]) == {12}
    found = next(row for row in summary(table) if (row["sweep"], row["value"]) == ("resolution", "360p"))
    speedups = rows[(rows["resolution"] == "360p") & (rows["schedule"] == "stagebreaker")]["speedup_vs_colocated"]
    assert (found["pairs"], found["vs_colocated_low"], found["vs_colocated_high"]) == (4, min(speedups), max(speedups))


def test_the_page_says_what_the_table_says(table):
    page = (CSV.parent / "predictions.md").read_text(encoding="utf-8")
    for row in summary(table):
        spans = [f"{row[f'vs_{one}_low']:.2f} to {row[f'vs_{one}_high']:.2f}" for one in ("colocated", "async_reward")]
        assert f"| {row['sweep']} = {row['value']} | {row['pairs']} | {spans[0]} | {spans[1]} |" in page
    steps = table.pivot_table(index=KEYS, columns="schedule", values="step_us")
    assert (steps["stagebreaker"] <= steps["merged_replay"]).all()
    still = (steps["merged_replay"] == steps["stagebreaker"]).sum()
    assert f"In {still} of the {len(steps)} settings moving nothing is best" in page


def test_the_command_writes_the_table_and_a_figure_per_sweep(monkeypatch, capsys, tmp_path):
    monkeypatch.setattr(predictions, "PAIRS", ("kvpo-vrt",))
    monkeypatch.setattr(predictions, "VALUES", {"candidates": (6,), "mini_batches": (3,)})
    monkeypatch.setattr(sys, "argv", ["stagebreaker-plan", "extrapolate", "--out", str(tmp_path), "--json"])
    main()
    printed = json.loads(capsys.readouterr().out)
    assert [(row["sweep"], row["value"]) for row in printed["ranges"]] == [("candidates", "6")]
    assert "mini_batches=3" in printed["refused"][0]["setting"]
    assert len(pd.read_csv(tmp_path / "predictions.csv")) == len(COMPARED)
    assert sorted(path.name for path in tmp_path.glob("*.png")) == ["predictions-candidates.png"]
