"""Which trees bench.acceptance grows."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from bench.promises import Promises
from bench.replay import Setting, Walk, Watch
from bench.shapes import CARTESIAN, STATIC, kind, nodes, width
from bench.tables import Tally
from graftree.config import SpeculatorConfig
from graftree.tree import TokenTree
from speculator_service import shapes

NGRAM, SSM, MERGED = "n-gram", "SSM", "SSM + n-gram"
BOOSTED, SINGLE = "two boosted SSMs", "one SSM of their size"
SPECULATORS = {
    NGRAM: ("ngram",),
    SSM: ("ssm",),
    MERGED: ("ssm", "ngram"),
    BOOSTED: ("boosted-1", "boosted-2"),
    SINGLE: ("single",),
}
BEST, CARTESIAN_TREE, STATIC_TREE = "best_first", "cartesian", "static"
TREES = (BEST, CARTESIAN_TREE, STATIC_TREE)
TOP = 5


@dataclass(frozen=True)
class Plan:
    """Settings by what they are for.

    Attributes:
        top: speculators -> the setting that counts how often the next token is among the first five.
        widths: k -> SpecInfer's expansion of width k, drafted by the SSM.
        budgets: (speculators, tree) -> nodes -> setting.
    """

    top: dict[str, Setting]
    widths: dict[int, Setting]
    budgets: dict[tuple[str, str], dict[int, Setting]]

    @classmethod
    def of(cls, budgets: Sequence[int], *, depth: int, boosted: bool = False, single: bool = False) -> Plan:
        """Everything that can be measured with the speculators there are.

        Args:
            budgets: keys of `bench.shapes.STATIC`.
            depth: of trees that grow best first.
            boosted, single: there are two boosted SSMs; one of their size.
        """
        names = [NGRAM, SSM, MERGED, *([BOOSTED] if boosted else []), *([SINGLE] if single else [])]
        grid: dict[tuple[str, str], dict[int, Setting]] = {}
        for name in names:
            given = SPECULATORS[name]
            grid[name, BEST] = {budget: Setting(given, BEST, budget, depth) for budget in budgets}
            for tree, known in ((CARTESIAN_TREE, CARTESIAN), (STATIC_TREE, STATIC)):
                grid[name, tree] = {
                    budget: Setting(given, kind(tree, known[budget]), budget, len(known[budget]))
                    for budget in budgets
                }
        return cls(
            top={name: Setting(SPECULATORS[name], kind(STATIC_TREE, (TOP,)), TOP, 1, forced=True) for name in names},
            widths={
                k: Setting(SPECULATORS[SSM], kind(STATIC_TREE, width(k)), nodes(width(k)), len(width(k)))
                for k in range(1, TOP + 1)
            },
            budgets=grid,
        )

    @property
    def settings(self) -> list[Setting]:
        """All of them, once each."""
        grid = [setting for by_budget in self.budgets.values() for setting in by_budget.values()]
        return list(dict.fromkeys([*self.top.values(), *self.widths.values(), *grid]))

    @property
    def branching(self) -> int:
        """Most children of a node."""
        usual: int = SpeculatorConfig.model_fields["branching"].default
        return max(shapes.parse(setting.tree).children or usual for setting in self.settings)

    def watch(self, tally: Tally, promises: Promises) -> dict[Setting, Watch]:
        """What looks on: ranks of the next token, and what became of the best-first trees' promises."""
        watches: dict[Setting, Watch] = {setting: _ranks(tally, setting) for setting in self.top.values()}
        for (name, tree), by_budget in self.budgets.items():
            if tree == BEST and len(SPECULATORS[name]) == 1:
                watches[by_budget[max(by_budget)]] = promises.watch(name)
        return watches


def _ranks(tally: Tally, setting: Setting) -> Watch:
    def look(walk: Walk, tree: TokenTree, path: Sequence[int]) -> None:
        # Nodes come most probable first, and all of them are children of the root.
        tally.ranked(setting, walk, path[0] if path else None)

    return look
