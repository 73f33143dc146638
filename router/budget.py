"""`Budget`: how many of a step's candidate nodes to verify.

A node is worth its survival probability in accepted tokens and costs one row of the verify step. The best number of
nodes maximises

    (E[accepted] + tokens that come anyway) / (seconds that pass anyway + step time of all rows)

where E[accepted] is the sum of the survival probabilities of the nodes taken (the sum
that OPT-Tree, arXiv 2406.17276, and Sequoia, arXiv 2402.12374, maximise). Candidates come best first, so only
prefixes need to be looked at; 0 nodes is an answer.
"""

from __future__ import annotations

from collections.abc import Callable

# Rows that a table grows by; as many steps as a request's whole tree takes at once.
_CHUNK = 64


class StepTable:
    """Step time by rows for one load of the verifier, with what a further row costs at least.

    Args:
        seconds: step time of a number of rows, from 1 on.

    Attributes:
        seconds: [r] step time of r rows; [0] stands for none and is that of one row.
        cheapest: [r] least seconds per row of any number of further rows, to the end of the table. Once a node is
            worth less than this, no later one pays either.
    """

    def __init__(self, seconds: Callable[[int], float]) -> None:
        self._seconds = seconds
        self.seconds: list[float] = [seconds(1)]
        self.cheapest: list[float] = [0.0]

    def reach(self, rows: int) -> None:
        """Make sure that the table goes to `rows`."""
        if rows < len(self.seconds):
            return
        size = -(-(rows + 1) // _CHUNK) * _CHUNK
        self.seconds.extend(self._seconds(count) for count in range(len(self.seconds), size + 1))
        self.cheapest = _least_slopes(self.seconds)


def _least_slopes(values: list[float]) -> list[float]:
    """[i] min over j > i of (values[j] - values[i]) / (j - i); 0 at the end: the slopes of the lower convex hull."""
    slopes = [0.0] * len(values)
    hull: list[int] = []
    for i in range(len(values) - 1, -1, -1):
        while len(hull) > 1:
            j, k = hull[-1], hull[-2]
            if (values[j] - values[i]) * (k - i) < (values[k] - values[i]) * (j - i):
                break
            hull.pop()
        if hull:
            slopes[i] = (values[hull[-1]] - values[i]) / (hull[-1] - i)
        hull.append(i)
    return slopes


class Budget:
    """Takes candidates in order of survival probability and keeps the number that pays most.

    Args:
        most: nodes at most.
        table: step time by rows.
        rows: rows of the step without any of the candidates: the root and what other sessions bring.
        seconds: what a round takes beside the step.
        tokens: tokens of the step without any of the candidates: the bonus token and other sessions' tokens.
        trust: factor on the candidates' survival probabilities.

    Attributes:
        nodes: the best number so far.
        rate: tokens per second with so many.
        count: candidates looked at.
        left: worth of the first one behind the best number; 0 = there was none.
    """

    __slots__ = (
        "_cheapest",
        "_most",
        "_rows",
        "_seconds",
        "_table",
        "_tokens",
        "_trust",
        "count",
        "left",
        "nodes",
        "rate",
    )

    def __init__(
        self,
        most: int,
        table: StepTable,
        *,
        rows: int = 1,
        seconds: float = 0.0,
        tokens: float = 1.0,
        trust: float = 1.0,
    ) -> None:
        table.reach(rows + most)
        self._most, self._table, self._cheapest = most, table.seconds, table.cheapest
        self._rows, self._seconds = rows, seconds
        self._tokens, self._trust = tokens, trust
        self.count = self.nodes = 0
        self.left = 0.0
        self.rate = tokens / (seconds + table.seconds[rows])

    def offer(self, survival: float) -> bool:
        """Look at the next candidate, at most as likely as the one before.

        Returns:
            Whether a later one can still pay; if not, it must not be offered.
        """
        self.count += 1
        worth = survival * self._trust
        self._tokens += worth
        rows = self._rows + self.count
        rate = self._tokens / (self._seconds + self._table[rows])
        if rate > self.rate:
            self.rate, self.nodes, self.left = rate, self.count, 0.0
        elif self.count == self.nodes + 1:
            self.left = worth
        return self.count < self._most and worth > self.rate * self._cheapest[rows]


class FixedBudget:
    """As many nodes as there are, up to a number that is given."""

    def __init__(self, most: int) -> None:
        self._most = most
        self.nodes = 0

    def offer(self, survival: float) -> bool:
        """As `Budget.offer`."""
        self.nodes = min(self.nodes + 1, self._most)
        return self.nodes < self._most
