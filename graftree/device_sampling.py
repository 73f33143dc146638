"""The rules of `graftree.sampling` for whole steps, on the device that the logits are on.

On a GPU what is chosen at every node of every tree is worked out at once, and only the tokens are read back: the one
wait for the device in a step. The steps and their order are `graftree.sampling`'s, in float64, and the noise's
integers are the same bits. Sums may run in another order and logarithms may differ in the last bit, so a token can
only differ from the host's where two candidates agree in some fifteen digits.

A grammar says on the host what may follow each node, while the device is still at the forward; the masks of all nodes
travel as bits in the step's one copy. Left to the host are the modes that test draws, and every row where something
must be refused: their logits are read back, as they are where log probabilities are asked for.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import TYPE_CHECKING
from weakref import WeakKeyDictionary

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from graftree import noise
from graftree.errors import InvalidArgument
from graftree.models.bundle import to_device

if TYPE_CHECKING:
    from graftree.sampling import OutputConstraint, SamplingContext, SamplingParams
    from graftree.tree import TokenTree

UNKNOWN = -1  # in place of a token: the host must look at that row
SCRATCH_BYTES = 1 << 30  # what a step's sampling takes of the device at most, whatever is sampled

_ELEMENTS = 1 << 23  # scores that are worked on at once: 64 MiB in float64, and a dozen such tensors
# Of `graftree.noise`, as torch's signed integers; they wrap around like unsigned ones.
_GAMMA, _MIX1, _MIX2 = (
    int(np.uint64(x).astype(np.int64)) for x in (0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB)
)


@dataclass(frozen=True)
class Choice:
    """What is chosen for one session: a token at the root and at each node of its tree.

    Attributes:
        params: validated, with a seed unless they are greedy.
        context: the committed sequence.
        tree: the step's.
    """

    params: SamplingParams
    context: SamplingContext
    tree: TokenTree

    def __len__(self) -> int:
        return 1 + len(self.tree)

    @property
    def plain(self) -> bool:
        """Whether the most likely token is the answer everywhere."""
        free = self.context.constraint is None and not self.context.banned(()).size
        return self.params.greedy and not self.params.changes_argmax and free

    def paths(self) -> list[tuple[int, ...]]:
        """Tokens behind the committed ones, at the root and at each node."""
        paths: list[tuple[int, ...]] = [()]
        for token, parent in zip(self.tree.token_ids, self.tree.parents, strict=True):
            paths.append((*paths[parent + 1], token))
        return paths


@dataclass
class _Kept:
    """Of a session, on the device: what is added to its logits, and which tokens its prompt holds, (V,) each."""

    biases: Tensor | None = None
    in_prompt: Tensor | None = None


class DeviceSampler:
    """One model's.

    Args:
        vocab_size: V.
        token_count: ids at or above this are padding; 0 = there is none.
        device: of the logits.
    """

    def __init__(self, vocab_size: int, token_count: int, device: torch.device) -> None:
        self._vocab, self._count, self._device = vocab_size, token_count or vocab_size, device
        self._ids = torch.arange(1, vocab_size + 1, device=device) * _GAMMA
        self._kept: WeakKeyDictionary[SamplingContext, _Kept] = WeakKeyDictionary()

    @torch.inference_mode()
    def pick(self, logits: Sequence[Tensor], choices: Sequence[Choice]) -> list[NDArray[np.int64]]:
        """Choose, and read the tokens back: the one place where the host waits for the device.

        Args:
            logits: (1 + nodes, V) of each choice, the root's first.

        Returns:
            (1 + nodes,) tokens of each choice, `UNKNOWN` where the host must look itself.
        """
        order = sorted(range(len(choices)), key=lambda index: not choices[index].plain)
        sizes = [len(choices[index]) for index in order]
        plain = sum(len(choice) for choice in choices if choice.plain)
        rows = torch.cat([logits[index] for index in order]) if len(order) > 1 else logits[order[0]]
        found = [_most_likely(rows[:plain, : self._count])] if plain else []
        others = [choices[index] for index in order if not choices[index].plain]
        step = max(1, _ELEMENTS // self._vocab)
        for start, part in _cut(others, step):
            found.append(self._processed(rows[plain + start : plain + start + len(part)], part))
        tokens = torch.cat(found).cpu().numpy()
        split = np.split(tokens, list(accumulate(sizes))[:-1])
        return [split[order.index(index)] for index in range(len(choices))]

    def _processed(self, logits: Tensor, part: Sequence[tuple[Choice, tuple[int, ...]]]) -> Tensor:
        """(n,) the tokens of some rows; steps 0 to 12 of `graftree.sampling`."""
        given = to_device(self._arrays(part), self._device)
        scores = logits.double()
        scores[:, self._count :] = -math.inf
        # Not `new_tensor`, here and below: that would be a copy that the host waits for.
        scores.index_put_((given["removed_rows"], given["removed"]), scores.new_full((), -math.inf))
        masked = 0
        for start, choice, paths in _by_choice(part):
            own = scores[start : start + len(paths)]
            if choice.context.constraint is not None:
                allowed = _unpacked(given["allowed"][masked : masked + len(paths)], self._vocab)
                own.masked_fill_(~allowed, -math.inf)
                masked += len(paths)
            if (biases := self._biases(choice)) is not None:
                own += biases
            if choice.params.penalised:
                self._penalise(own, choice, paths)
        scores /= given["temperature"][:, None]
        scores.masked_fill_(scores < scores.amax(1, keepdim=True) + given["min_p"][:, None], -math.inf)
        most = max((choice.params.top_k for choice, _ in part if choice.params.top_k < self._vocab), default=0)
        if most:
            least = scores.topk(most).values.gather(1, given["top_k"][:, None])
            scores.masked_fill_((scores < least) & given["cut"][:, None], -math.inf)
        if len(given["nucleus"]):
            nucleus = _nucleus(_log_softmax(scores[given["nucleus"]]), given["top_p"][:, None])
            scores.index_copy_(0, given["nucleus"], nucleus)
        best = scores.amax(1)
        scores = _log_softmax(scores)
        if any(not choice.params.greedy for choice, _ in part):
            scores += torch.where(given["drawn"][:, None], self._gumbel(given["keys"]), 0.0)
        return torch.where(best.isfinite(), scores.argmax(1), UNKNOWN)

    def _arrays(self, part: Sequence[tuple[Choice, tuple[int, ...]]]) -> dict[str, NDArray[np.generic]]:
        params = [choice.params for choice, _ in part]
        cut = [not p.greedy and 0 < p.top_k < self._vocab for p in params]
        nucleus = [row for row, p in enumerate(params) if not p.greedy and p.top_p < 1]
        removed = [(row, token) for row, (choice, path) in enumerate(part) for token in _removed(choice, path)]
        keys = [
            0 if p.greedy or p.seed is None else noise.key64(p.seed, len(choice.context) + len(path))
            for p, (choice, path) in zip(params, part, strict=True)
        ]
        min_p = [math.log(p.min_p) if p.min_p > 0 and not p.greedy else -math.inf for p in params]
        return {
            "temperature": np.array([1.0 if p.greedy else p.temperature for p in params]),
            "min_p": np.array(min_p),
            "top_k": np.array([p.top_k - 1 if kept else 0 for p, kept in zip(params, cut, strict=True)]),
            "cut": np.array(cut),
            "nucleus": np.array(nucleus, np.int64),
            "top_p": np.array([params[row].top_p for row in nucleus]),
            "drawn": np.array([not p.greedy for p in params]),
            "keys": np.array(keys, np.uint64).astype(np.int64),
            "removed_rows": np.array([row for row, _ in removed], np.int64),
            "removed": np.array([token for _, token in removed], np.int64),
            "allowed": self._allowed(part),
        }

    def _allowed(self, part: Sequence[tuple[Choice, tuple[int, ...]]]) -> NDArray[np.uint8]:
        """(rows under a constraint, V / 8) step 1 as bits, the lowest first: which tokens may follow."""
        packed = [np.zeros((0, -(-self._vocab // 8)), np.uint8)]
        for _, choice, paths in _by_choice(part):
            if choice.context.constraint is not None:
                masks = _followers(choice.context.constraint, paths, self._vocab)
                packed.append(np.packbits(masks, axis=1, bitorder="little"))
        return np.concatenate(packed)

    def _biases(self, choice: Choice) -> Tensor | None:
        """(V,) steps 2, 3 (whole words of one token) and 5: all that does not depend on the output."""
        params, kept = choice.params, self._kept.setdefault(choice.context, _Kept())
        if not (params.allowed_token_ids or params.banned or params.logit_bias):
            return None
        if kept.biases is None:
            biases = np.full(self._vocab, -math.inf if params.allowed_token_ids else 0.0)
            biases[params.allowed_ids] = 0.0
            tokens, values = params.biases
            biases[tokens] += values
            biases[params.banned_ids] = -math.inf
            kept.biases = to_device({"biases": biases}, self._device)["biases"]
        return kept.biases

    def _penalise(self, scores: Tensor, choice: Choice, paths: Sequence[tuple[int, ...]]) -> None:
        """Steps 6 and 7 on the rows of one session, (n, V), in place."""
        params, kept = choice.params, self._kept.setdefault(choice.context, _Kept())
        rows = np.repeat(np.arange(len(paths)), [len(path) for path in paths])
        tokens = np.array([token for path in paths for token in path], np.int64)
        before = choice.context.counts(()).copy()
        given = to_device({"before": before, "rows": rows, "tokens": tokens}, self._device)
        counts = given["before"].expand(len(paths), -1).clone()
        counts.index_put_((given["rows"], given["tokens"]), counts.new_ones(()), accumulate=True)
        used = counts > 0
        if params.repetition_penalty != 1:
            if kept.in_prompt is None:
                kept.in_prompt = to_device({"seen": choice.context.in_prompt()}, self._device)["seen"]
            penalty = params.repetition_penalty
            changed = torch.where(scores > 0, scores / penalty, scores * penalty)
            scores.copy_(torch.where(used | kept.in_prompt, changed, scores))
        scores -= params.frequency_penalty * counts
        scores -= params.presence_penalty * used

    def _gumbel(self, keys: Tensor) -> Tensor:
        """(n, V) `graftree.noise.gumbel` of every token; keys: (n,) int64."""
        x = keys[:, None] + self._ids
        x = (x ^ _shifted(x, 30)) * _MIX1
        x = (x ^ _shifted(x, 27)) * _MIX2
        x = _shifted(x ^ _shifted(x, 31), 11)
        return x.double().add_(0.5).mul_(2.0**-53).log_().neg_().log_().neg_()


def _most_likely(logits: Tensor) -> Tensor:
    """(n,) where the logits themselves decide."""
    best, tokens = logits.max(1)
    return torch.where(best.isfinite(), tokens, UNKNOWN)


def _removed(choice: Choice, path: tuple[int, ...]) -> Iterator[int]:
    """Tokens that must not follow `path`, because of what was said before: steps 3 (phrases) and 4."""
    for length, phrases in choice.params.phrases.items():
        yield from phrases.get(choice.context.tail(path, length), ())
    yield from choice.context.banned(path).tolist()


def _followers(constraint: OutputConstraint, paths: Sequence[tuple[int, ...]], vocab_size: int) -> NDArray[np.bool_]:
    """(n, V) which tokens may follow each path, a node's before its children's; none where the constraint refuses.

    No walk comes to a node that its parent's mask leaves out, so the constraint is not asked about what is below.
    """
    masks = np.zeros((len(paths), vocab_size), np.bool_)
    seen: dict[tuple[int, ...], NDArray[np.bool_]] = {}
    for mask, path in zip(masks, paths, strict=True):
        seen[path] = mask
        before = seen.get(path[:-1]) if path else None
        if before is None or before[path[-1]]:
            with suppress(InvalidArgument):  # the host says so, should it come there
                mask[:] = constraint.allowed(path)
    return masks


def _unpacked(bits: Tensor, size: int) -> Tensor:
    """(n, size / 8) uint8 -> (n, size) bool, the lowest bit first."""
    places = torch.arange(8, dtype=torch.uint8, device=bits.device)
    return ((bits[:, :, None] >> places) & 1).flatten(1)[:, :size].bool()


def _cut(choices: Sequence[Choice], step: int) -> Iterator[tuple[int, list[tuple[Choice, tuple[int, ...]]]]]:
    """Rows of all choices, `step` at a time, and the number of rows before them."""
    rows = [(choice, path) for choice in choices for path in choice.paths()]
    for start in range(0, len(rows), step):
        yield start, rows[start : start + step]


def _by_choice(
    part: Sequence[tuple[Choice, tuple[int, ...]]],
) -> Iterator[tuple[int, Choice, list[tuple[int, ...]]]]:
    """The rows of each choice, and where they begin."""
    begins = [row for row in range(len(part)) if not row or part[row][0] is not part[row - 1][0]]
    for start, stop in pairwise([*begins, len(part)]):
        yield start, part[start][0], [path for _, path in part[start:stop]]


def _log_softmax(scores: Tensor) -> Tensor:
    """(n, V) normalised, as `graftree.sampling.log_softmax` does it."""
    shifted = scores - scores.amax(1, keepdim=True)
    return shifted - shifted.exp().sum(1, keepdim=True).log()


def _nucleus(log_probs: Tensor, top_p: Tensor) -> Tensor:
    """(n, V) the most likely tokens, in order, while those before them hold less than `top_p`, (n, 1)."""
    ordered, order = log_probs.sort(dim=1, descending=True, stable=True)
    reached = ordered.exp().cumsum(1)
    kept = torch.cat([torch.ones_like(reached[:, :1], dtype=torch.bool), reached[:, :-1] < top_p], 1)
    return log_probs.masked_fill(~torch.zeros_like(kept).scatter_(1, order, kept), -math.inf)


def _shifted(x: Tensor, bits: int) -> Tensor:
    """Logical shift to the right; torch's own keeps the sign."""
    return (x >> bits) & ((1 << (64 - bits)) - 1)
