"""The published results from the shipped fitted profiles."""

import csv
import json
import sys
from dataclasses import replace

import pytest

from stagebreaker.placement.__main__ import main
from stagebreaker.placement.reproduce import (
    best_placement,
    graphs_of,
    is_reproduced,
    reproduce,
    simulated,
    to_csv,
)
from stagebreaker.placement.search import search
from stagebreaker.placement.space import Space
from stagebreaker.sim.critical import GAP, by_kind, critical_path
from stagebreaker.sim.published import ACTORS, REWARDS, Case, all_cases, published, shipped_profile, step_of
from stagebreaker.sim.workload import Cluster


@pytest.fixture(scope="module")
def cases():
    ticks = []
    found = simulated(tick=ticks.append)
    assert sum(ticks) == len(all_cases())
    return found


@pytest.fixture(scope="module")
def rows():
    return reproduce()


def ok(rows, figure):
    return [row["ok"] for row in rows if row["id"].startswith(figure)]


def test_every_published_row_stands_in_the_answer_with_its_keys(rows):
    assert [row["id"] for row in rows] == [row.id for row in published()]
    keys = ["id", "published_low", "published_high", "reproduced_low", "reproduced_high", "in_fit", "ok"]
    for row in rows:
        assert list(row) == keys
        assert row["reproduced_low"] <= row["reproduced_high"]


def test_figure_16(rows):
    assert len(ok(rows, "fig16.")) == 15
    assert sum(ok(rows, "fig16.")) >= 13, [row for row in rows if not row["ok"]]


def test_figure_9(rows):
    assert len(ok(rows, "fig9.")) == 7
    assert sum(ok(rows, "fig9.")) >= 6, [row for row in rows if not row["ok"]]


def test_ratios_of_stagebreaker_agree_with_each_other(rows):
    value = {row["id"].removeprefix("fig16."): row["reproduced_low"] for row in rows}
    product = value["stagebreaker_vs_async_reward"] * value["async_reward_vs_colocated"]
    assert product == pytest.approx(value["stagebreaker_vs_colocated"], abs=1e-3)


def test_what_counts_as_reproduced():
    share = replace(published()[0], id="fig16.x", low=0.13, high=0.13)
    assert is_reproduced(share, 0.149, 0.149)
    assert not is_reproduced(share, 0.109, 0.109)
    ratio = replace(share, low=0.78, high=0.78)
    assert is_reproduced(ratio, 0.742, 0.742)
    assert not is_reproduced(ratio, 0.82, 0.82)
    wide = replace(share, id="fig9.x", low=1.0, high=1.1)
    assert is_reproduced(wide, 0.971, 1.132)
    assert not is_reproduced(wide, 0.969, 1.05)
    assert not is_reproduced(wide, 1.05, 1.134)


@pytest.mark.parametrize("pair", ["dancegrpo-urflex", "dancegrpo-vrt"])
@pytest.mark.parametrize("profile", ["fitted", "provisional"])
def test_branch_and_bound_finds_what_the_exhaustive_search_finds(pair, profile):
    case, costs = Case(pair, 12), shipped_profile(f"{profile}-{pair}")
    cluster = Cluster.equal(ACTORS + REWARDS, costs.gpu_kinds[0].name)
    workload = case.workload("stagebreaker")
    space = Space.of(workload, ACTORS + REWARDS, (ACTORS, REWARDS), ("one_batch",))
    best = search(workload, cluster, costs, space, method="exhaustive").best
    found = best_placement(case, costs)
    assert (step_of(case, found, costs).makespan_us, found.key()) == (best.step_us, best.best.key())


def test_five_of_the_six_decodes_of_each_actor_move_at_24_candidates():
    found = best_placement(Case("dancegrpo-vrt", 24), shipped_profile("fitted-dancegrpo-vrt"))
    assert (found.actors, found.rewards, found.scoring) == (4, 2, "one_batch")
    assert found.vae_moved == 5 * ACTORS


def test_the_csv_holds_every_row_with_the_errors_of_both_ends(rows):
    lines = list(csv.DictReader(to_csv(rows).splitlines()))
    assert [line["id"] for line in lines] == [row["id"] for row in rows]
    for line in lines:
        for end in ("low", "high"):
            error = float(line[f"reproduced_{end}"]) / float(line[f"published_{end}"]) - 1
            assert float(line[f"error_{end}"]) == pytest.approx(error, abs=1e-4)
    assert {line["in_fit"] for line in lines} == {"True", "False"}


def test_the_graphs_are_those_of_the_timelines(cases):
    case = Case("dancegrpo-vrt", 24)
    placement, steps = cases[case]
    for name, graph in graphs_of(case, placement, steps).items():
        assert graph.lanes == steps[name].lanes
        path = critical_path(steps[name], graph)
        assert GAP not in by_kind(path)
        assert sum(by_kind(path).values()) == steps[name].makespan_us


def test_the_command_refuses_a_folder_that_is_a_file_before_it_simulates(monkeypatch, capsys, tmp_path):
    (tmp_path / "taken").write_text("")
    monkeypatch.setattr(sys, "argv", ["stagebreaker-plan", "reproduce", "--out", str(tmp_path / "taken")])
    with pytest.raises(SystemExit) as end:
        main()
    assert end.value.code == 2
    assert "taken" in capsys.readouterr().err


def test_the_command_prints_every_row_and_writes_them(monkeypatch, capsys, tmp_path):
    monkeypatch.setattr(sys, "argv", ["stagebreaker-plan", "reproduce", "--json", "--out", str(tmp_path)])
    main()
    assert {path.name for path in tmp_path.iterdir()} == {"fig3.png", "fig9.png", "fig16.png", "reproduced.csv"}
    assert all(path.read_bytes().startswith(b"\x89PNG") for path in tmp_path.glob("*.png"))
    assert len((tmp_path / "reproduced.csv").read_text().splitlines()) == 25
    rows = json.loads(capsys.readouterr().out)
    keys = {"id", "published_low", "published_high", "reproduced_low", "reproduced_high", "in_fit", "ok"}
    assert len(rows) == 24
    assert all(set(row) == keys for row in rows)
