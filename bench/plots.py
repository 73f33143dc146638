"""Plots of bench.acceptance, as PNG."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from graftree.calibration import Reliability

if TYPE_CHECKING:
    from matplotlib.axes import Axes

LEAST = 20  # nodes of a bin that is shown
LINES = {"best_first": "-", "cartesian": "--", "static": ":"}


def _figure(rows: int, columns: int, *, width: float = 4.2, height: float = 3.4) -> tuple[Any, list[list[Axes]]]:
    """A figure and its axes. matplotlib is needed here alone, and draws without a display."""
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(
        rows, columns, figsize=(width * columns, height * rows), squeeze=False, layout="constrained"
    )
    return figure, axes.tolist()


def _save(figure: Any, path: Path) -> None:
    from matplotlib import pyplot

    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=110)
    pyplot.close(figure)


def budgets(path: Path, taus: Mapping[str, Mapping[tuple[str, str], Mapping[int, float]]]) -> None:
    """Mean acceptance length by node budget.

    Args:
        taus: panel -> (speculators, tree) -> budget -> tau.
    """
    figure, axes = _figure(1, len(taus), width=5.2, height=4.2)
    colours: dict[str, str] = {}
    for panel, (title, lines) in zip(axes[0], taus.items(), strict=True):
        for (speculators, tree), points in lines.items():
            colour = colours.setdefault(speculators, f"C{len(colours)}")
            label = f"{speculators}, {tree}"
            panel.plot(list(points), list(points.values()), LINES[tree], color=colour, marker="o", ms=3, label=label)
        panel.set(title=title, xscale="log", xlabel="nodes verified", ylabel="tokens per step")
        panel.set_xticks(ticks := sorted({b for points in lines.values() for b in points}), map(str, ticks))
        panel.minorticks_off()
        panel.grid(alpha=0.3)
    axes[0][-1].legend(fontsize=7, loc="center left", bbox_to_anchor=(1.0, 0.5))
    _save(figure, path)


def bars(path: Path, panels: Mapping[str, Mapping[str, Mapping[str, float]]], what: str) -> None:
    """Grouped bars: panel -> colour -> group -> height."""
    figure, axes = _figure(len(panels), 1, width=9.0, height=3.2)
    for (title, series), (panel,) in zip(panels.items(), axes, strict=True):
        step = 0.8 / len(series)
        for index, (name, heights) in enumerate(series.items()):
            places = [group + index * step - 0.4 + step / 2 for group in range(len(heights))]
            panel.bar(places, list(heights.values()), step, label=name)
            panel.set_xticks(range(len(heights)), list(heights))
        panel.set(title=title, ylabel=what)
        panel.grid(axis="y", alpha=0.3)
    axes[0][0].legend(fontsize=7)
    _save(figure, path)


def reliability(path: Path, panels: Sequence[Sequence[tuple[str, Mapping[str, Reliability]]]]) -> None:
    """Observed against promised: a grid of (title, name -> reliability)."""
    figure, axes = _figure(len(panels), max(len(row) for row in panels), width=3.2, height=3.2)
    for row, own in zip(panels, axes, strict=True):
        for (title, curves), panel in zip(row, own, strict=False):
            panel.plot([0, 1], [0, 1], color="grey", lw=0.7)
            for name, counted in curves.items():
                points = [point for point in counted.bins() if point.count >= LEAST]
                label = f"{name}: error {counted.error():.3f}"
                predicted, observed = [p.predicted for p in points], [p.observed for p in points]
                panel.plot(predicted, observed, marker="o", ms=3, label=label)
            panel.set(title=title, xlim=(0, 1), ylim=(0, 1), xlabel="promised survival", ylabel="observed")
            panel.legend(fontsize=7)
            panel.grid(alpha=0.3)
    _save(figure, path)
