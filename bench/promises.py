"""Promised survival of draft tokens against what became of them, before and after calibration."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from bench.replay import Walk, Watch
from graftree.calibration import Reliability
from graftree.tree import TokenTree

DEPTHS = ("1", "2", "3-4", "5+")


def depth_name(depth: int) -> str:
    """The group of depths that a depth belongs to."""
    return DEPTHS[min(depth - 1, 2) if depth < 5 else 3]


class Promises:
    """Of every node that was verified: the survival probability promised for it, and whether it was accepted.

    A node survives if it and all its ancestors carry the LLM's tokens. "promised" multiplies the speculator's own
    probabilities down the path, "calibrated" the router's.
    """

    def __init__(self) -> None:
        self._counted: dict[tuple[str, float, str], dict[str, Reliability]] = {}

    def watch(self, speculator: str) -> Watch:
        """What looks on at the steps of a setting with this one speculator."""

        def look(walk: Walk, tree: TokenTree, path: Sequence[int]) -> None:
            taken, promised, calibrated = set(path), list[float](), list[float]()
            for index, (identifier, parent, log_prob) in enumerate(
                zip(tree.node_ids(), tree.parents, tree.log_probs, strict=True)
            ):
                said = max(walk.promises[identifier].values())
                promised.append(said + (promised[parent] if parent >= 0 else 0.0))
                calibrated.append(log_prob + (calibrated[parent] if parent >= 0 else 0.0))
                counted = self._at(speculator, walk.recording.temperature, depth_name(tree.depths[index]))
                counted["promised"].observe(math.exp(promised[index]), index in taken)
                counted["calibrated"].observe(math.exp(calibrated[index]), index in taken)

        return look

    def of(self, speculator: str, temperature: float, depth: str = "") -> dict[str, Reliability]:
        """What was counted at a group of depths; "" = at all."""
        total = {"promised": Reliability(), "calibrated": Reliability()}
        for (name, t, group), counted in self._counted.items():
            if name == speculator and t == temperature and depth in ("", group):
                for kind, reliability in counted.items():
                    total[kind].merge(reliability)
        return total

    def details(self) -> list[dict[str, Any]]:
        """As JSON has it."""
        return [
            {
                "speculator": speculator,
                "temperature": temperature,
                "depth": depth,
                "nodes": counted["promised"].count,
                **{
                    kind: {
                        "error": round(reliability.error(), 4),
                        "bins": [[b.count, round(b.predicted, 4), round(b.observed, 4)] for b in reliability.bins()],
                    }
                    for kind, reliability in counted.items()
                },
            }
            for (speculator, temperature, depth), counted in sorted(self._counted.items())
        ]

    def _at(self, speculator: str, temperature: float, depth: str) -> dict[str, Reliability]:
        return self._counted.setdefault(
            (speculator, temperature, depth), {"promised": Reliability(), "calibrated": Reliability()}
        )
