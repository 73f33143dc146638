"""Collective boost-tuning (SpecInfer, section 3): several SSMs, each taught what those before it do not get.

SpecInfer trains an SSM to the fullest, marks the samples whose continuation it and the LLM agree on, drops them and
trains the next SSM on the rest. Here a sample is a run of tokens: one is marked when it lies in a run of at least
`run` tokens that the student guesses, each the LLM's most likely token. Whole continuations of hundreds of tokens are
hardly ever guessed, and of a small student few runs of several tokens either (one layer: 3 % of the text is in runs
of 4), so by default single tokens are marked: what counts in a tree is whether a node has the right child.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor

from graftree.distill.assignment import Assignment
from graftree.distill.card import package
from graftree.distill.run import (
    DistillSettings,
    begin,
    head_tokens,
    open_corpus,
    student_of,
    tell_set_aside,
    train,
    vocabulary,
    write,
)
from graftree.distill.streams import FORCED
from graftree.distill.trainer import Trainer, TrainSettings
from graftree.distill.writer import Written
from graftree.errors import InvalidArgument
from graftree.models.load import llm_identity
from graftree.models.ssm import SsmCard

_WIDTHS = (1, 2, 3, 4)


@dataclass(frozen=True)
class BoostReport:
    """Held-out success: the share of answer positions where the LLM's most likely token is among the children.

    Attributes:
        alone: of each SSM with 1, 2, 3, 4 children.
        merged: of all together, by the number of children of all; each gives its share, best first.
        single: of one SSM of the total size; () = none was trained.
        marked: share of the training text that was marked after each SSM.
    """

    alone: tuple[tuple[float, ...], ...]
    merged: tuple[float, ...]
    single: tuple[float, ...]
    marked: tuple[float, ...]

    def lines(self) -> list[str]:
        """The report as a table."""
        rows = [(f"SSM {k + 1}", row) for k, row in enumerate(self.alone)]
        rows.append(("merged", self.merged))
        if self.single:
            rows.append(("one of the same size", self.single))
        head = f"{'children':<22}" + "".join(f"{width:>8}" for width in _WIDTHS)
        return [head, *(f"{name:<22}" + "".join(f"{100 * value:>7.1f}%" for value in row) for name, row in rows)]


def boost(
    settings: DistillSettings,
    layers: Sequence[tuple[int, ...]],
    single: tuple[int, ...],
    out: Path,
    work: Path,
    *,
    run: int = 1,
    prompts: Sequence[str] = (),
    quiet: bool = False,
    say: Callable[[str], None] = lambda line: None,
) -> BoostReport:
    """Train SSMs one after another, each on what is left; then one as large as all of them, to compare with.

    Args:
        settings: its `layers` are not used.
        layers: of the LLM, that each SSM begins as.
        single: that the one SSM begins as; () = it is not trained.
        out: directory for the packages `ssm-1`, `ssm-2`, ..., and `single`.
        work: corpus and checkpoints; a run that was killed goes on from there.
        run: tokens in a row that a student must get for them to be marked.
    """
    if not 1 <= run <= settings.corpus.length:
        raise InvalidArgument("run", run, f"1 to {settings.corpus.length}")
    if not layers:
        raise InvalidArgument("layers", layers, "at least one SSM")
    llm = begin(settings, out, work, [*layers, single])
    identity = llm_identity(llm)
    corpus = open_corpus(settings, identity, work, prompts)
    chosen = [*((f"ssm-{k + 1}", own) for k, own in enumerate(layers)), *([("single", single)] if single else [])]
    head_size = min(settings.head_size, vocabulary(llm))
    assignments = [Assignment.of(own, head_size, corpus.settings, settings.shards) for _, own in chosen]
    for index in range(len(layers)):
        assignments[index] = _after(assignments[index], layers[:index], run, settings.train)
    paths = [work / f"{name}.safetensors" for name, _ in chosen]
    for path, assignment in zip(paths, assignments, strict=True):
        assignment.check(path)
    write(settings, corpus, prompts, quiet=quiet, say=say)
    tokens = head_tokens(settings, corpus)
    solved = [torch.zeros(corpus.settings.streams, corpus.settings.length, dtype=torch.bool)] * settings.shards
    held_out: list[tuple[Tensor, Tensor]] = []
    marked: list[float] = []
    for (name, own), path, assignment in zip(chosen, paths, assignments, strict=True):
        view = _without(solved) if name != "single" else _whole
        say(f"{name}: layers {', '.join(map(str, own))}")
        trainer = Trainer(
            student_of(settings, own, tokens), corpus, tokens, settings.train, shards=settings.shards,
            assignment=assignment.with_tokens(tokens), checkpoint_path=path, view=view,
        )  # fmt: skip
        tell_set_aside(trainer, say)
        train(trainer, quiet)
        measures = trainer.measure()
        package(trainer.student, tokens, SsmCard(str(llm), identity, own, len(tokens), measures=measures), out / name)
        held_out.append(_success(trainer, settings.shards - 1))
        if name != "single":
            solved = [solved[k] | mark(trainer, k, run) for k in range(settings.shards - settings.train.held_out)]
            marked.append(float(torch.stack(solved).float().mean()))
            say(f"{name}: {100 * marked[-1]:.1f} % of the text is marked now")
    return _report(held_out, bool(single), marked)


def _after(own: Assignment, before: Sequence[tuple[int, ...]], run: int, settings: TrainSettings) -> Assignment:
    """The assignment of an SSM that learns what those before it do not get."""
    if not before:
        return own
    return replace(own, before=tuple(before), run_length=run, taught=(settings.epochs, settings.minutes))


def mark(trainer: Trainer, index: int, run: int) -> Tensor:
    """(B, T) bool: tokens of a shard in a run of at least `run` that the student gets."""
    guesses, batch = trainer.guesses(index, 1)
    right = _wanted(batch.targets, batch.chances, guesses)[..., 0]  # the guess after each token
    right = torch.cat([torch.zeros_like(right[:, :1]), right[:, :-1]], 1)  # of each token
    whole = right.float().unfold(1, run, 1).amin(-1)  # (B, T - run + 1), 1 = a run begins here
    padded = torch.nn.functional.pad(whole, (run - 1, run - 1))
    return padded.unfold(1, run, 1).amax(-1).bool()


def _without(solved: Sequence[Tensor]) -> Callable[[int, Written], Written]:
    return lambda index, written: replace(written, roles=written.roles.masked_fill(solved[index], FORCED))


def _whole(index: int, written: Written) -> Written:
    return written


def _wanted(targets: Tensor, chances: Tensor, guesses: Tensor) -> Tensor:
    """(B, T, K) bool: guess k is the LLM's most likely token."""
    wanted = targets.gather(-1, chances.argmax(-1, keepdim=True))
    return (guesses == wanted) & (chances.max(-1, keepdim=True).values > 0)


def _success(trainer: Trainer, index: int) -> tuple[Tensor, Tensor]:
    """Of a held-out shard: (N, 4) which guess is right, and (N, 4) what is guessed, at the N answer positions."""
    guesses, batch = trainer.guesses(index, _WIDTHS[-1])
    return _wanted(batch.targets, batch.chances, guesses)[batch.answers], guesses[batch.answers]


def _report(held_out: list[tuple[Tensor, Tensor]], with_single: bool, marked: list[float]) -> BoostReport:
    curves = [right.cumsum(-1).bool().float().mean(0).tolist() for right, _ in held_out]
    several = held_out[:-1] if with_single else held_out
    merged = [float(_merged(several, width).float().mean()) for width in _WIDTHS]
    return BoostReport(
        tuple(tuple(curve) for curve in (curves[:-1] if with_single else curves)),
        tuple(merged),
        tuple(curves[-1]) if with_single else (),
        tuple(marked),
    )


def _merged(several: list[tuple[Tensor, Tensor]], width: int) -> Tensor:
    """(N,) whether one of `width` distinct children is right: the SSMs take turns, each with its best new token."""
    count = several[0][0].shape[0]
    hit = torch.zeros(count, dtype=torch.bool)
    chosen = torch.full((count, width), -1)
    filled = torch.zeros(count, dtype=torch.int64)
    for rank in range(_WIDTHS[-1]):
        for right, guesses in several:
            token = guesses[:, rank]
            new = (filled < width) & (chosen != token[:, None]).all(-1)
            chosen[new, filled[new]] = token[new]
            filled += new
            hit |= new & right[:, rank]
    return hit
