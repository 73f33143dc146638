"""Counts, tables, shapes, reliability: the arithmetic of bench.acceptance on steps made up for it."""

from __future__ import annotations

import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from bench import acceptance_report, report
from bench.acceptance_plan import BEST, MERGED, NGRAM, SSM, Plan
from bench.promises import Promises
from bench.recording import Prompt, Recording
from bench.replay import Setting, Step, followed
from bench.shapes import BUDGETS, CARTESIAN, STATIC, SUCCESS, best, expected, nodes, width
from bench.tables import ALL, Table, Tally
from graftree.tree import TokenTree
from speculator_service.shapes import parse

SETTING, OTHER = Setting(("ssm",), BEST, 4, 4), Setting(("ngram",), BEST, 4, 4)


def walk(category: str, temperature: float, delivered: list[int]) -> Any:
    """A finished walk: the prompt's own step, then one of 4 nodes for each number of delivered tokens."""
    recording = Recording(Prompt(0, category, (1,)), (), temperature, 0, False)
    steps = [Step(0, 0, 1), *(Step(4, count - 1, count) for count in delivered)]
    return SimpleNamespace(recording=recording, steps=steps)


def test_tau_is_tokens_over_steps_without_the_prompts_own() -> None:
    """Pooled over texts, by category and temperature, and the lead of one setting over another."""
    tally = Tally()
    tally.add(SETTING, [walk("a", 0.0, [1, 4]), walk("b", 0.0, [2, 2, 2]), walk("b", 1.0, [5]), walk("a", 0.0, [])])
    tally.add(OTHER, [walk("a", 0.0, [1, 1]), walk("b", 0.0, [2, 2, 2]), walk("b", 1.0, [1]), walk("a", 0.0, [])])
    assert tally.categories == ["a", "b"]
    assert tally.tau(SETTING, 0.0) == 11 / 5
    assert tally.tau(SETTING, 0.0, "a") == 2.5
    assert tally.tau(SETTING, 1.0, "b") == 5
    assert math.isnan(tally.tau(SETTING, 1.0, "a"))
    assert tally.drafted(SETTING, 0.0) == 4
    lead, error = tally.lead(SETTING, OTHER, 0.0)
    assert lead == pytest.approx(11 / 5 - 8 / 5)
    assert 0 < error < 1
    assert tally.lead(SETTING, OTHER, 0.0, "b") == (0.0, 0.0)


def test_success_is_the_share_of_tokens_among_the_first_k() -> None:
    """Cumulative over ranks, the missed ones in the denominator; no number where nothing was counted."""
    tally = Tally()
    top = Setting(("ssm",), "static:3", 3, 1, forced=True)
    for category, rank in [("a", 0), ("a", 0), ("a", 2), ("b", None)]:
        tally.ranked(top, walk(category, 0.0, []), rank)
    assert tally.success(top, 0.0) == [0.5, 0.5, 0.75]
    assert tally.success(top, 0.0, "a") == [2 / 3, 2 / 3, 1.0]
    assert all(map(math.isnan, tally.success(top, 1.0, ALL)))


def test_a_table_shows_what_there_is() -> None:
    """Columns line up, a number there is none of is a dash, and null in JSON."""
    table = Table.of("title", [1, "width"], ["row", "a longer row"], lambda name: (len(name), math.nan))
    lines = str(table).splitlines()
    assert len({len(line) for line in lines}) == 1
    assert lines[1].split() == ["row", "3.00", "-"]
    assert table.details()["rows"]["row"] == [3, None]


def test_a_text_is_followed_as_far_as_the_tree_goes() -> None:
    """The longest path from the root whose tokens are the text's."""
    tree = TokenTree(0, (5, 6, 7, 8), (-1, -1, 1, 2), (-1.0,) * 4)
    assert followed(tree, (6, 7, 9)) == (1, 2)
    assert followed(tree, (6, 7, 8, 1)) == (1, 2, 3)
    assert followed(tree, (9,)) == followed(tree, ()) == ()


def test_shapes_are_the_best_of_their_family_and_fit_their_budget() -> None:
    """The lists are what the search finds, and what a speculator's configuration takes."""
    assert nodes(width(3)) == 20
    assert expected((2, 1), (0.5, 0.6)) == pytest.approx(0.6 + 0.6 * 0.5)
    for budget in BUDGETS:
        assert best(budget, "static") == STATIC[budget]
        assert best(budget, "cartesian") == CARTESIAN[budget]
        assert nodes(STATIC[budget]) <= budget >= nodes(CARTESIAN[budget])
        assert expected(CARTESIAN[budget], SUCCESS) >= expected(STATIC[budget], SUCCESS)
    # A surer drafter makes deeper trees.
    assert len(best(16, "cartesian", (0.9, 0.95))) > len(best(16, "cartesian", (0.3, 0.5, 0.6)))


def test_promises_are_multiplied_down_the_path_and_held_against_the_text() -> None:
    """Promised and calibrated survival of every node, whether it was taken, by depth."""
    promises = Promises()
    tree = TokenTree(9, (1, 2, 3), (-1, 0, 0), (math.log(0.5), math.log(0.5), math.log(0.25)))
    said = dict(zip(tree.node_ids(), ({"ssm": math.log(p)} for p in (0.8, 0.5, 0.3)), strict=True))
    looked: Any = walk("a", 0.0, [])
    looked.promises = said
    promises.watch("SSM")(looked, tree, (0, 1))
    first, second = promises.of("SSM", 0.0, "1"), promises.of("SSM", 0.0, "2")
    (only,) = first["promised"].bins()
    assert (only.count, only.predicted, only.observed) == (1, pytest.approx(0.8), 1.0)
    assert [(b.predicted, b.observed) for b in second["promised"].bins()] == [
        (pytest.approx(0.24), 0.0),
        (pytest.approx(0.4), 1.0),
    ]
    assert [b.predicted for b in second["calibrated"].bins()] == [pytest.approx(0.125), pytest.approx(0.25)]
    assert promises.of("SSM", 0.0)["promised"].count == 3
    assert [entry["depth"] for entry in promises.details()] == ["1", "2"]


def test_a_plan_has_every_setting_once_and_its_targets_say_met_and_missed(tmp_path: Path) -> None:
    """Made-up counts in which best first wins and merging loses somewhere; tables, JSON details and plots of them."""
    plan = Plan.of([4, 16], depth=8, boosted=True, single=True)
    settings = plan.settings
    assert len(settings) == len(set(settings))
    assert plan.branching >= max(parse(setting.tree).children for setting in settings)
    tally, promises = Tally(), Promises()
    for setting in settings:
        gain = (setting.tree == BEST) + (len(setting.speculators) == 2)
        for temperature in (0.0, 1.0):
            both = [walk("a", temperature, [1 + gain] * 4), walk("b", temperature, [2] * 4)]
            tally.add(setting, both)
    for setting in plan.top.values():
        for temperature in (0.0, 1.0):
            tally.ranked(setting, walk("a", temperature, []), 1)
    out = report.Report("test")
    acceptance_report.targets(out, plan, tally, promises)
    met = {figure.name: figure.met for figure in out.figures}
    assert met[f"greedy: {BEST} - best other, {SSM}, 16 nodes"] is True
    assert met[f"greedy: {MERGED} - better part, 16 nodes, worst category"] is False
    details = acceptance_report.details(plan, tally, promises)
    (row,) = [
        entry
        for entry in details["trees"]
        if (entry["speculators"], entry["tree"], entry["budget"], entry["mode"]) == (("ssm",), BEST, 4, "greedy")
    ]
    assert row["tokens_per_step"] == {"a": 2.0, "b": 2.0, ALL: 2.0}
    assert any(table.title == f"greedy: top-k success, {NGRAM}" for table in acceptance_report.tables(plan, tally))
    acceptance_report.plot(tmp_path, plan, tally, promises)
    assert {path.name for path in tmp_path.iterdir()} == {
        "budgets.png",
        "categories.png",
        "success.png",
        "reliability_greedy.png",
        "reliability_temperature_1.png",
    }


def test_walks_are_told_apart_by_setting() -> None:
    """Trees of a fixed shape are grown anew, to their size and no further; others live on and grow beyond theirs."""
    fixed, living = Setting(("ssm",), "static:2,1", 4, 2), Setting(("ssm",), BEST, 4, 2)
    assert (fixed.anew, fixed.living_nodes, fixed.living_depth) == (True, 4, 2)
    assert (living.anew, living.living_nodes > 4, living.living_depth > 2) == (False, True, True)
