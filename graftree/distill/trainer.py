"""`Trainer`: epochs over a corpus, with held-out measures and checkpoints.

A run that was killed goes on at its last checkpoint and ends with the same weights: the order of the batches is a
function of (seed, epoch), and the state of the optimisers is saved with the weights.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from random import Random
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from graftree.distill import checkpoint
from graftree.distill.assignment import REMEDY, Assignment
from graftree.distill.corpus import Corpus
from graftree.distill.student import Batch, hits, loss
from graftree.distill.writer import Written
from graftree.errors import Incompatible, InvalidArgument
from graftree.models.load import computes_bfloat16
from graftree.models.ssm import embedding_rows

MEASURED = 64  # sequences of each held-out shard
_TOGETHER = 4  # shards whose sequences are mixed


@dataclass(frozen=True)
class TrainSettings:
    """How a student learns.

    Attributes:
        epochs: passes over the corpus.
        batch: sequences per optimiser step; micro: of these at a time.
        learning_rate: peak, of matrices under Muon (Jordan et al., 2024).
        adam_rate: peak, of everything else under AdamW, the head included.
        warmup: share of all steps in which the rates rise; then they fall linearly to a twentieth.
        held_out: shards from the end of the corpus that are never trained on.
        seed: of the order.
        minutes: longest time for this run; the rates follow the clock instead of the steps. 0 = no limit.
    """

    epochs: int = 6
    batch: int = 16
    micro: int = 4
    learning_rate: float = 0.01
    adam_rate: float = 1e-3
    warmup: float = 0.03
    held_out: int = 1
    seed: int = 0
    minutes: float = 0.0

    def __post_init__(self) -> None:
        limits = {
            "epochs": (1, 10_000), "batch": (1, 4096), "micro": (1, self.batch), "learning_rate": (0.0, 1.0),
            "adam_rate": (0.0, 1.0), "warmup": (0.0, 1.0), "held_out": (1, 1000), "minutes": (0.0, 1e6),
        }  # fmt: skip
        for name, (low, high) in limits.items():
            if not low <= getattr(self, name) <= high:
                raise InvalidArgument(name, getattr(self, name), f"{low} to {high}")


@dataclass
class Progress:
    """Where a run is: epoch and batch in it, steps and tokens so far, seconds spent, last measures."""

    epoch: int = 0
    batch: int = 0
    steps: int = 0
    tokens: int = 0
    seconds: float = 0.0


class Trainer:
    """Teaches one student.

    Args:
        student: with float32 parameters; those that take no gradient stay as they are.
        corpus: at least `held_out` + 1 shards.
        draft_ids: the token of each row of the student's head.
        assignment: what the student is; None = a checkpoint is not compared with it.
        checkpoint_path: file that a killed run goes on from, written every `checkpoint_seconds`; None = none is kept.
        view: of a shard's number and text, what the student sees of it, e.g. with some of it not counted.
        mixed: compute in bfloat16 where the device does so natively.
        clock: seconds.

    Attributes:
        set_aside: where a checkpoint of this student went that had learned from another amount of text: training
            began anew then. None = there was none.

    Raises:
        Incompatible: the checkpoint is damaged, or was made by another student or with other settings.
    """

    def __init__(
        self,
        student: PreTrainedModel,
        corpus: Corpus,
        draft_ids: list[int],
        settings: TrainSettings,
        *,
        shards: int,
        assignment: Assignment | None = None,
        checkpoint_path: Path | None = None,
        checkpoint_seconds: float = 120.0,
        mixed: bool | None = None,
        view: Callable[[int, Written], Written] = lambda _, written: written,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        if shards <= settings.held_out:
            raise InvalidArgument("shards", shards, f"more than the {settings.held_out} held out")
        self.student, self.settings, self.progress = student, settings, Progress()
        self.last: dict[str, float] = {}
        self._corpus, self._shards, self._clock, self._view = corpus, shards, clock, view
        self._assignment = assignment
        self.set_aside: Path | None = None
        self._checkpoint, self._checkpoint_seconds = checkpoint_path, checkpoint_seconds
        self._device = student.device
        self._mixed = computes_bfloat16(self._device) if mixed is None else mixed
        self._row_of = torch.full((embedding_rows(student),), -1, dtype=torch.int64)
        self._row_of[torch.tensor(draft_ids)] = torch.arange(len(draft_ids))
        self._optimisers = _optimisers(student, settings)
        self.total_steps = settings.epochs * -(
            -(shards - settings.held_out) * corpus.settings.streams // settings.batch
        )
        if checkpoint_path is not None and checkpoint_path.exists():
            self._restore(checkpoint_path)

    def train(self, tell: Callable[[Progress, float], None] = lambda progress, value: None) -> None:
        """Learn until the epochs, or the minutes, are over.

        Args:
            tell: told after each step, with the step's loss.
        """
        saved = last = self._clock()
        while self.progress.epoch < self.settings.epochs and not self._out_of_time():
            for batches in self._epoch():
                value = self._step(batches)
                now = self._clock()
                self.progress.seconds, last = self.progress.seconds + now - last, now
                self.progress.batch += 1
                tell(self.progress, value)
                if now - saved >= self._checkpoint_seconds:
                    self._save()
                    self.measure(16)
                    saved = last = self._clock()
                if self._out_of_time():
                    break
            else:
                self.progress.epoch, self.progress.batch = self.progress.epoch + 1, 0
        self._save()

    @torch.no_grad()
    def guesses(self, index: int, largest: int = 5) -> tuple[Tensor, Batch]:
        """What the student would say in a shard.

        Returns:
            (B, T, largest) int64 rows of its head, most likely first, and the shard as one batch.
        """
        written = self._corpus.read(index)
        rows = torch.arange(written.token_ids.shape[0])
        self.student.eval()
        parts = []
        for part in rows.split(self.settings.micro):
            logits = self._logits(Batch.of(written, part, self._row_of, self._device))
            parts.append(torch.topk(logits, min(largest, logits.shape[-1]), dim=-1).indices.cpu())
        self.student.train()
        return torch.cat(parts), Batch.of(written, rows, self._row_of, torch.device("cpu"))

    @torch.no_grad()
    def measure(self, sequences: int = MEASURED) -> dict[str, float]:
        """Top-k success over held-out answers: the share whose most likely token is among the student's first k."""
        self.student.eval()
        total = torch.zeros(6, dtype=torch.int64)
        first = self._shards - self.settings.held_out
        for shard in self._corpus.shards(range(first, self._shards)):
            for rows in torch.arange(min(sequences, shard.token_ids.shape[0])).split(self.settings.micro):
                batch = Batch.of(shard, rows, self._row_of, self._device)
                total += hits(self._logits(batch), batch).cpu()
        self.student.train()
        self.last = {f"top{k + 1}": float(total[k]) / max(int(total[5]), 1) for k in range(5)}
        return self.last

    # One step.

    def _logits(self, batch: Batch) -> Tensor:
        with torch.autocast(self._device.type, torch.bfloat16, enabled=self._mixed):
            logits: Tensor = self.student(input_ids=batch.token_ids, use_cache=False).logits
        return logits

    def _step(self, batches: list[Batch]) -> float:
        rate = self._rate()
        total = 0.0
        for batch in batches:
            value = loss(self._logits(batch), batch)
            (value / len(batches)).backward()
            total += float(value.detach()) / len(batches)
            self.progress.tokens += batch.token_ids.numel()
        torch.nn.utils.clip_grad_norm_([p for p in self.student.parameters() if p.requires_grad], 1.0)
        for optimiser in self._optimisers:
            for group in optimiser.param_groups:
                group["lr"] = group["peak"] * rate
            optimiser.step()
            optimiser.zero_grad(set_to_none=True)
        self.progress.steps += 1
        return total

    def _rate(self) -> float:
        if self.settings.minutes:
            done = self.progress.seconds / (60 * self.settings.minutes)
        else:
            done = self.progress.steps / self.total_steps
        if done < self.settings.warmup:
            return max(done / self.settings.warmup, 1 / (self.settings.warmup * self.total_steps + 1))
        return 0.05 + 0.95 * max(0.0, 1 - done) / (1 - self.settings.warmup)

    def _out_of_time(self) -> bool:
        return bool(self.settings.minutes) and self.progress.seconds >= 60 * self.settings.minutes

    def _epoch(self) -> Iterator[list[Batch]]:
        """The epoch's steps from `progress.batch` on, each as its micro-batches."""
        random = Random(f"{self.settings.seed}.{self.progress.epoch}")
        order = list(range(self._shards - self.settings.held_out))
        random.shuffle(order)
        skip = self.progress.batch
        for begin in range(0, len(order), _TOGETHER):
            chosen = order[begin : begin + _TOGETHER]
            written = _joined([self._view(index, self._corpus.read(index)) for index in chosen])
            rows = list(range(written.token_ids.shape[0]))
            random.shuffle(rows)
            for start in range(0, len(rows), self.settings.batch):
                if skip:
                    skip -= 1
                    continue
                parts = torch.tensor(rows[start : start + self.settings.batch]).split(self.settings.micro)
                yield [Batch.of(written, part, self._row_of, self._device) for part in parts]

    # Checkpoints.

    def _save(self) -> None:
        if self._checkpoint is None:
            return
        learning = {name: p for name, p in self.student.named_parameters() if p.requires_grad}
        about: dict[str, Any] = {"settings": asdict(self.settings), "progress": asdict(self.progress)}
        if self._assignment is not None:
            about["assignment"] = self._assignment.about()
        checkpoint.save(self._checkpoint, learning, self._optimisers, about)

    def _restore(self, path: Path) -> None:
        about, own = checkpoint.read(path), asdict(self.settings)
        if self._assignment is not None and not self._assignment.continues(path):
            self.set_aside = path.with_suffix(".before")
            os.replace(path, self.set_aside)
            return
        for name in own.keys() - {"epochs", "minutes"}:
            if (before := about["settings"].get(name)) != own[name]:
                raise Incompatible(f"{path} was made with {name} {before}, now it is {own[name]}: {REMEDY}")
        self.progress = Progress(**about["progress"])
        checkpoint.restore(path, self.student, self._optimisers)


def _optimisers(student: PreTrainedModel, settings: TrainSettings) -> list[torch.optim.Optimizer]:
    """Muon for the layers' matrices, AdamW for the head, norms and biases."""
    head = student.get_output_embeddings()
    apart = set(map(id, head.parameters())) if head is not None else set()
    learning = [p for p in student.parameters() if p.requires_grad]
    matrices = [p for p in learning if p.ndim == 2 and id(p) not in apart]
    others = [p for p in learning if p.ndim != 2 or id(p) in apart]
    made: list[torch.optim.Optimizer] = []
    if matrices:
        muon: Any = torch.optim.Muon
        made.append(muon(matrices, lr=settings.learning_rate, weight_decay=0.01, momentum=0.95))
    if others:
        made.append(torch.optim.AdamW(others, lr=settings.adam_rate, betas=(0.9, 0.95), weight_decay=0.0))
    for optimiser in made:
        for group in optimiser.param_groups:
            group["peak"] = group["lr"]
    return made


def _joined(shards: list[Written]) -> Written:
    return Written(
        torch.cat([shard.token_ids for shard in shards]),
        torch.cat([shard.roles for shard in shards]),
        torch.cat([shard.top_ids for shard in shards]),
        torch.cat([shard.top_log_probs for shard in shards]),
    )
