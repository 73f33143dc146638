"""Tables, targets, details and plots of bench.acceptance."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from bench import plots, report
from bench.acceptance_plan import BEST, BOOSTED, MERGED, NGRAM, SINGLE, SPECULATORS, SSM, TOP, TREES, Plan
from bench.promises import DEPTHS, Promises
from bench.tables import ALL, Table, Tally

MODES = {"greedy": 0.0, "temperature 1": 1.0}
# SpecInfer, tables 1 and 2: LLaMA-7B with LLaMA-68M, over its five sets of prompts.
PAPER = {
    "greedy": "paper: top-1 .62-.70, top-5 .82-.89; width 5: 3.1-3.9",
    "temperature 1": "paper: top-1 .52-.57, top-5 .95-.97",
}
USUAL = 16  # nodes: the budget that the tables by category are of


def _modes(tally: Tally) -> dict[str, float]:
    """Those that were measured."""
    return {mode: t for mode, t in MODES.items() if t in tally.temperatures}


def _usual(plan: Plan) -> int:
    budgets = list(plan.budgets[SSM, BEST])
    return USUAL if USUAL in budgets else budgets[-1]


def tables(plan: Plan, tally: Tally) -> Iterator[Table]:
    """In the order of SpecInfer's: success, width, budget; then by category."""
    categories = [*tally.categories, ALL]
    names = list(dict.fromkeys(name for name, _ in plan.budgets))
    for mode, t in _modes(tally).items():
        for name, setting in plan.top.items():
            yield Table.of(
                f"{mode}: top-k success, {name}",
                range(1, TOP + 1),
                categories,
                lambda category, s=setting, t=t: tally.success(s, t, category),
            )
        yield Table.of(
            f"{mode}: tokens per step by width, depth 8, SSM",
            plan.widths,
            categories,
            lambda category, t=t: (tally.tau(s, t, category) for s in plan.widths.values()),
        )
        rows = {f"{tree}, {name}": by_budget for (name, tree), by_budget in plan.budgets.items()}
        yield Table.of(
            f"{mode}: tokens per step by nodes, all categories",
            plan.budgets[SSM, BEST],
            rows,
            lambda row, t=t, rows=rows: (tally.tau(s, t) for s in rows[row].values()),
        )
        for budget in plan.budgets[SSM, BEST]:
            yield Table.of(
                f"{mode}: tokens per step, {BEST}, {budget} nodes",
                categories,
                names,
                lambda name, t=t, b=budget: (tally.tau(plan.budgets[name, BEST][b], t, c) for c in categories),
            )


def targets(out: report.Report, plan: Plan, tally: Tally, promises: Promises) -> None:
    """Figures with what is wanted of them, and the paper's beside."""
    for mode, t in _modes(tally).items():
        success = tally.success(plan.top[SSM], t)
        out.add(f"{mode}: top-1 success, SSM", success[0], "", PAPER[mode])
        out.add(f"{mode}: top-5 success, SSM", success[-1])
        out.add(f"{mode}: tokens per step at width 5, SSM", tally.tau(plan.widths[TOP], t))
        for name in dict.fromkeys(name for name, _ in plan.budgets):
            _shapes(out, plan, tally, name, mode)
        for budget in plan.budgets[SSM, BEST]:
            _merging(out, plan, tally, budget, mode)
        for name in (NGRAM, SSM):
            counted = promises.of(name, t)
            before, after = counted["promised"].error(), counted["calibrated"].error()
            label = f"{mode}: calibration error, {name}"
            out.add(label, after, f"was {before:.3f}", "below before", after < before)


def _shapes(out: report.Report, plan: Plan, tally: Tally, name: str, mode: str) -> None:
    """Best first against the better of the static trees, at every budget."""
    for budget, best in plan.budgets[name, BEST].items():
        leads = {
            tree: tally.lead(best, plan.budgets[name, tree][budget], MODES[mode]) for tree in TREES if tree != BEST
        }
        rival = min(leads, key=lambda tree: leads[tree][0])
        ahead, error = leads[rival]
        label = f"{mode}: {BEST} - best other, {name}, {budget} nodes"
        out.add(label, ahead, f"+- {error:.3f}", f"> 0 ({rival})", ahead > 0)


def _merging(out: report.Report, plan: Plan, tally: Tally, budget: int, mode: str) -> None:
    """Merged against the better of its parts, where it is least ahead; boosted against one of the same size."""
    setting = {name: plan.budgets[name, BEST][budget] for name, tree in plan.budgets if tree == BEST}
    t = MODES[mode]
    leads = {
        category: min(tally.lead(setting[MERGED], setting[part], t, category) for part in (NGRAM, SSM))
        for category in tally.categories
    }
    worst = min(leads, key=lambda category: leads[category][0])
    ahead, error = leads[worst]
    label = f"{mode}: {MERGED} - better part, {budget} nodes, worst category"
    out.add(label, ahead, f"+- {error:.3f}", f"> 0 ({worst})", ahead > 0)
    if BOOSTED in setting and SINGLE in setting:
        ahead, error = tally.lead(setting[BOOSTED], setting[SINGLE], t)
        out.add(f"{mode}: {BOOSTED} - {SINGLE}, {budget} nodes", ahead, f"+- {error:.3f}", "> 0", ahead > 0)


def details(plan: Plan, tally: Tally, promises: Promises) -> dict[str, Any]:
    """The JSON's share."""
    return {
        "texts": len(next(iter(tally.counts.values()))),
        "tables": [table.details() for table in tables(plan, tally)],
        "trees": [
            {
                "speculators": SPECULATORS[name],
                "tree": setting.tree,
                "budget": budget,
                "mode": mode,
                "nodes_per_step": round(tally.drafted(setting, t), 2),
                "tokens_per_step": {c: round(tally.tau(setting, t, c), 4) for c in (*tally.categories, ALL)},
            }
            for (name, _), by_budget in plan.budgets.items()
            for budget, setting in by_budget.items()
            for mode, t in _modes(tally).items()
        ],
        "reliability": promises.details(),
    }


def plot(directory: Path, plan: Plan, tally: Tally, promises: Promises) -> None:
    """PNG files: budgets, categories, success, reliability per mode."""
    plots.budgets(
        directory / "budgets.png",
        {
            mode: {
                key: {budget: tally.tau(setting, t) for budget, setting in by_budget.items()}
                for key, by_budget in plan.budgets.items()
            }
            for mode, t in _modes(tally).items()
        },
    )
    usual = _usual(plan)
    by_category = {
        f"{mode}, {usual} nodes": {
            name: {c: tally.tau(by_budget[usual], t, c) for c in tally.categories}
            for (name, tree), by_budget in plan.budgets.items()
            if tree == BEST
        }
        for mode, t in _modes(tally).items()
    }
    plots.bars(directory / "categories.png", by_category, "tokens per step")
    success = {
        mode: {
            f"top {k + 1}": {c: tally.success(plan.top[SSM], t, c)[k] for c in tally.categories} for k in range(TOP)
        }
        for mode, t in _modes(tally).items()
    }
    plots.bars(directory / "success.png", success, "next token among them")
    for mode, t in _modes(tally).items():
        grid = [
            [(f"{name}, depth {depth or 'any'}", promises.of(name, t, depth)) for depth in ("", *DEPTHS)]
            for name, given in SPECULATORS.items()
            if len(given) == 1 and (name, BEST) in plan.budgets
        ]
        plots.reliability(directory / f"reliability_{mode.replace(' ', '_')}.png", grid)
