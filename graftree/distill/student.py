"""The SSM while it learns: which tokens it can say, what it begins as, its loss and its measures."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor
from transformers import PreTrainedModel

from graftree.distill.streams import ANSWER, FORCED
from graftree.distill.writer import Written
from graftree.models import ssm
from graftree.models.load import few_layers, load
from graftree.models.uri import ModelUri

# What a position's guess is worth to learn: drafts are wanted in answers; a user's turn is text all the same.
_USER_WEIGHT = 0.3


def choose_tokens(shards: Iterable[Written], vocab_size: int, size: int) -> list[int]:
    """The `size` tokens that carry most of the LLM's probability in its own answers, ascending.

    FR-Spec (arXiv 2502.14856) and EAGLE-3 (arXiv 2503.01840) cut a draft head to the frequent tokens likewise.
    """
    mass = torch.zeros(vocab_size, dtype=torch.float64)
    for shard in shards:
        chances = shard.top_log_probs.double().exp() * (shard.roles != FORCED)[..., None]
        mass.index_add_(0, shard.top_ids.flatten().long(), chances.flatten())
        mass.index_add_(0, shard.token_ids.flatten().long(), torch.full((shard.token_ids.numel(),), 1e-3).double())
    return sorted(torch.topk(mass, min(size, vocab_size)).indices.tolist())


def build(llm: ModelUri, layers: tuple[int, ...], draft_ids: list[int]) -> PreTrainedModel:
    """A student, float32 on the CPU: these layers of the LLM, its embedding (frozen) and its head's rows."""
    student = few_layers(llm, layers, torch.float32)
    state = {
        name: tensor for name, tensor in load(_cut(llm, layers)).model.state_dict().items() if "embed" not in name
    }
    student.load_state_dict(state, strict=False)
    ssm.give_head(student, draft_ids)
    student.requires_grad_(True)
    student.get_input_embeddings().requires_grad_(False)
    return student.train()


def _cut(llm: ModelUri, layers: tuple[int, ...]) -> ModelUri:
    option = "keep" if llm.kind == "random" else "layers"
    return ModelUri(llm.kind, llm.name, {**llm.options, option: layers})


@dataclass(frozen=True)
class Batch:
    """What a step learns from.

    Attributes:
        token_ids: (b, T) int64.
        targets: (b, T, K) int64, rows of the head; where the LLM's token is none of them, 0 with chance 0.
        chances: (b, T, K) float32, the LLM's probabilities of these.
        weights: (b, T) float32, what the guess after each token is worth.
        answers: (b, T) bool, the guess after this token is of an answer.
    """

    token_ids: Tensor
    targets: Tensor
    chances: Tensor
    weights: Tensor
    answers: Tensor

    @classmethod
    def of(cls, written: Written, rows: Tensor, row_of: Tensor, device: torch.device) -> Batch:
        """Rows of a shard. rows: indices; row_of: (V,) int64, -1 = the head has no such token."""
        targets = row_of[written.top_ids[rows].long()]
        known = targets >= 0
        roles = written.roles[rows].roll(-1, 1)  # of the token that is guessed
        roles[:, -1] = FORCED
        answers = roles == ANSWER
        weights = answers.float() + _USER_WEIGHT * ((roles != ANSWER) & (roles != FORCED)).float()
        batch = cls(
            written.token_ids[rows].long(),
            targets.clamp_min(0),
            written.top_log_probs[rows].float().exp() * known,
            weights,
            answers,
        )
        return cls(*(getattr(batch, name).to(device) for name in cls.__dataclass_fields__))


def loss(logits: Tensor, batch: Batch) -> Tensor:
    """Cross entropy with the LLM's distribution, mean over weighted positions. logits: (b, T, H) any float dtype."""
    logits = logits.float()
    said = (batch.chances * logits.gather(-1, batch.targets)).sum(-1)
    each = batch.chances.sum(-1) * torch.logsumexp(logits, -1) - said
    return (each * batch.weights).sum() / batch.weights.sum().clamp_min(1.0)


@torch.no_grad()
def hits(logits: Tensor, batch: Batch, largest: int = 5) -> Tensor:
    """(largest,) counts of answer positions whose most likely token of the LLM is among the student's first k, and
    behind them the number of such positions."""
    wanted = batch.targets.gather(-1, batch.chances.argmax(-1, keepdim=True))
    # Where the LLM's own favourite has no row in the head nothing can hit it; its chance was set to 0.
    possible = batch.chances.max(-1).values > 0
    first = torch.topk(logits, min(largest, logits.shape[-1]), dim=-1).indices
    right = (first == wanted).cumsum(-1).bool() & (possible & batch.answers)[..., None]
    counts = right.flatten(0, 1).sum(0)
    return torch.cat([counts, batch.answers.sum()[None]])
