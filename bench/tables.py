"""Counts of replayed steps, and tables of them."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:  # a table alone needs none of what is replayed
    from bench.replay import Setting, Walk

ALL = "all"


@dataclass(frozen=True)
class Count:
    """One walk along one text, without the prompt's own step."""

    category: str
    temperature: float
    steps: int
    delivered: int
    drafted: int
    accepted: int

    @classmethod
    def of(cls, walk: Walk) -> Count:
        steps = walk.steps[1:]
        return cls(
            walk.recording.prompt.category,
            walk.recording.temperature,
            len(steps),
            sum(step.delivered for step in steps),
            sum(step.drafted for step in steps),
            sum(step.accepted for step in steps),
        )


@dataclass
class Tally:
    """What all settings gave.

    Attributes:
        counts: per setting one count per recording, in the recordings' order for every setting.
        ranks: per forced setting and (temperature, category): [k] how often the k-th of a root's children was the
            LLM's token; the last entry: none of them.
    """

    counts: dict[Setting, list[Count]] = field(default_factory=dict)
    ranks: dict[tuple[Setting, float, str], list[int]] = field(default_factory=dict)

    def add(self, setting: Setting, walks: Iterable[Walk]) -> None:
        """Count finished walks; those without a step of their own say nothing."""
        self.counts.setdefault(setting, []).extend(Count.of(walk) for walk in walks)

    def ranked(self, setting: Setting, walk: Walk, rank: int | None) -> None:
        """One root of a forced walk: which of its children was right."""
        key = setting, walk.recording.temperature, walk.recording.prompt.category
        row = self.ranks.setdefault(key, [0] * (setting.budget + 1))
        row[setting.budget if rank is None else rank] += 1

    @property
    def categories(self) -> list[str]:
        """In the order of the recordings."""
        return list(dict.fromkeys(count.category for counts in self.counts.values() for count in counts))

    @property
    def temperatures(self) -> set[float]:
        """That anything was counted at."""
        return {count.temperature for counts in self.counts.values() for count in counts}

    def tau(self, setting: Setting, temperature: float, category: str = ALL) -> float:
        """Mean acceptance length: tokens per verify step, the bonus token included."""
        chosen = self._chosen(setting, temperature, category)
        steps = sum(count.steps for count in chosen)
        return sum(count.delivered for count in chosen) / steps if steps else math.nan

    def drafted(self, setting: Setting, temperature: float) -> float:
        """Mean nodes per verify step."""
        chosen = self._chosen(setting, temperature, ALL)
        steps = sum(count.steps for count in chosen)
        return sum(count.drafted for count in chosen) / steps if steps else math.nan

    def lead(self, one: Setting, other: Setting, temperature: float, category: str = ALL) -> tuple[float, float]:
        """tau(one) - tau(other), and its standard error by bootstrap over the texts."""
        pairs = np.array(
            [
                (a.delivered, a.steps, b.delivered, b.steps)
                for a, b in zip(
                    self._chosen(one, temperature, category), self._chosen(other, temperature, category), strict=True
                )
            ],
            dtype=np.float64,
        )
        if not pairs.size:
            return math.nan, math.nan
        drawn = np.random.default_rng(0).integers(0, len(pairs), (500, len(pairs)))
        sums = pairs[drawn].sum(axis=1)
        leads = sums[:, 0] / sums[:, 1] - sums[:, 2] / sums[:, 3]
        whole = pairs.sum(axis=0)
        return float(whole[0] / whole[1] - whole[2] / whole[3]), float(leads.std())

    def success(self, setting: Setting, temperature: float, category: str = ALL) -> list[float]:
        """[k - 1] share of tokens that are among the k most likely children of the node before; NaN without any."""
        rows = [
            row
            for (known, t, c), row in self.ranks.items()
            if known == setting and t == temperature and category in (ALL, c)
        ]
        if not rows:
            return [math.nan] * setting.budget
        summed = np.sum(rows, axis=0)
        return [float(value) for value in np.cumsum(summed[:-1]) / summed.sum()]

    def _chosen(self, setting: Setting, temperature: float, category: str) -> list[Count]:
        return [
            count
            for count in self.counts.get(setting, ())
            if count.temperature == temperature and category in (ALL, count.category) and count.steps
        ]


@dataclass(frozen=True)
class Table:
    """Rows of numbers under named columns."""

    title: str
    columns: tuple[str, ...]
    rows: tuple[tuple[str, tuple[float, ...]], ...]

    @classmethod
    def of(
        cls, title: str, columns: Sequence[Any], names: Iterable[str], row: Callable[[str], Iterable[float]]
    ) -> Table:
        """One row per name."""
        return cls(title, tuple(map(str, columns)), tuple((name, tuple(row(name))) for name in names))

    def __str__(self) -> str:
        names = max(len(self.title), *(len(name) for name, _ in self.rows))
        width = max(6, *(len(column) for column in self.columns)) + 1
        lines = [f"{self.title:<{names}}" + "".join(f"{column:>{width}}" for column in self.columns)]
        for name, values in self.rows:
            lines.append(f"{name:<{names}}" + "".join(f"{_shown(value):>{width}}" for value in values))
        return "\n".join(lines)

    def details(self) -> dict[str, Any]:
        """As JSON has it; a number that there is none of is null."""
        rows = {
            name: [None if math.isnan(value) else round(value, 4) for value in values] for name, values in self.rows
        }
        return {"title": self.title, "columns": list(self.columns), "rows": rows}


def _shown(value: float) -> str:
    return "-" if math.isnan(value) else f"{value:.2f}"
