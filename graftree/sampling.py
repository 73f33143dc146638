"""How a token is chosen from the LLM's logits: one implementation for plain decoding and for every tree node.

Order and meaning follow vLLM (v1/sample/sampler.py), computed in float64. Log probabilities that are reported are the
model's own, before all of this, or those behind step 11 (`describe`). docs/sampling.md says it at length.

    0. padding               ids that the tokenizer does not have are removed
    1. structured output     tokens that the constraint does not allow are removed
    2. allowed tokens        if there are any, all others are removed
    3. bad words             banned tokens are removed, and the last token of a phrase whose others end the output
    4. minimum tokens        stop tokens are removed until min_new_tokens are out
    5. logit bias            added; -100 removes the token
    6. repetition penalty    tokens of prompt and output: positive logits / r, others * r
    7. frequency penalty     - f * (occurrences in the output)
       presence penalty      - p for tokens of the output
    8. temperature           below 1e-5: the argmax here is the answer, 9 to 11 cannot change it
    9. min-p                 drops p < min_p * max p
   10. top-k                 drops what is below the k-th largest; ties with it stay
   11. top-p                 keeps the smallest set, most likely first, that reaches p of what is left
   12. draw                  argmax(log p + g), g = `graftree.noise.gumbel(seed, position, token)`

What looks at the output (1, 3, 4, 6, 7) includes the node's own path from the root. Equal scores go to the lowest id.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
from numpy.typing import ArrayLike, NDArray

from graftree import noise
from graftree.errors import GraftreeError, InvalidArgument
from graftree.sampling_params import BAN as BAN
from graftree.sampling_params import GREEDY as GREEDY
from graftree.sampling_params import MAX_BIASES as MAX_BIASES
from graftree.sampling_params import SamplingParams as SamplingParams

if TYPE_CHECKING:
    from graftree.v1 import common_pb2

Floats = NDArray[np.float64]

_NEAR = 12.0  # below the best score by more than this are most tokens, and seldom those that a filter keeps
_HEAD = 1024  # top-p sorts this many of the most likely tokens first; they nearly always suffice


class OutputConstraint(Protocol):
    """What sampling needs of `graftree.constraint.Constraint`."""

    def allowed(self, path: Sequence[int]) -> NDArray[np.bool_]: ...

    def advance(self, token_ids: Sequence[int]) -> None: ...


class SamplingContext:
    """What the processors know of one sequence: its prompt and the output committed so far."""

    def __init__(
        self,
        prompt_ids: Sequence[int],
        output_ids: Sequence[int] = (),
        *,
        vocab_size: int,
        min_new_tokens: int = 0,
        stop_token_ids: Iterable[int] = (),
        constraint: OutputConstraint | None = None,
        token_count: int | None = None,
    ) -> None:
        """
        Args:
            prompt_ids: tokens of the prompt.
            output_ids: tokens generated and committed so far.
            vocab_size: V, length of the logits.
            min_new_tokens: stop tokens are not chosen for this many output tokens.
            stop_token_ids: the tokens meant; ids at or above V are ignored.
            constraint: what the output must look like; stands behind `output_ids`.
            token_count: ids at or above this are padding and never chosen; None = V.
        """
        self.token_count = vocab_size if token_count is None else min(token_count, vocab_size)
        self.constraint = constraint
        self._prompt_ids = tuple(prompt_ids)
        self._output_ids = list(output_ids)
        self._vocab_size = vocab_size
        self._min_new_tokens = min_new_tokens
        self._stop_token_ids = np.array(sorted({t for t in stop_token_ids if 0 <= t < vocab_size}), dtype=np.intp)
        self._in_prompt: NDArray[np.bool_] | None = None
        self._counts: NDArray[np.int64] | None = None

    def __len__(self) -> int:
        """Tokens of prompt and output: the absolute position of the next one."""
        return len(self._prompt_ids) + len(self._output_ids)

    def extend(self, token_ids: Sequence[int]) -> None:
        """Commit output tokens."""
        self._output_ids.extend(token_ids)
        if self.constraint is not None:
            self.constraint.advance(token_ids)
        if self._counts is not None:
            np.add.at(self._counts, np.asarray(token_ids, dtype=np.intp), 1)

    def tail(self, path: Sequence[int], length: int) -> tuple[int, ...]:
        """The last `length` tokens of output and path, or fewer."""
        missing = length - len(path)
        before = self._output_ids[-missing:] if missing > 0 else ()
        return (*before, *path[max(0, -missing) :])

    def banned(self, path: Sequence[int]) -> NDArray[np.intp]:
        """Tokens that min_new_tokens forbids behind `path`."""
        early = len(self._output_ids) + len(path) < self._min_new_tokens
        return self._stop_token_ids if early else self._stop_token_ids[:0]

    def counts(self, path: Sequence[int]) -> NDArray[np.int64]:
        """(V,) occurrences in output and path."""
        if self._counts is None:
            self._counts = np.zeros(self._vocab_size, dtype=np.int64)
            np.add.at(self._counts, np.asarray(self._output_ids, dtype=np.intp), 1)
        if not path:
            return self._counts
        counts = self._counts.copy()
        np.add.at(counts, np.asarray(path, dtype=np.intp), 1)
        return counts

    def in_prompt(self) -> NDArray[np.bool_]:
        """(V,) whether the prompt holds the token."""
        if self._in_prompt is None:
            self._in_prompt = np.zeros(self._vocab_size, dtype=np.bool_)
            self._in_prompt[np.asarray(self._prompt_ids, dtype=np.intp)] = True
        return self._in_prompt


@dataclass(frozen=True)
class TokenLogProb:
    """Log probability of a chosen token, in the model's own distribution or in the processed one.

    Attributes:
        token_id: the token.
        log_prob: natural logarithm.
        rank: 1 = most likely; ties are ranked by id.
        alternatives: (token id, log probability) of the most likely tokens, best first.
    """

    token_id: int
    log_prob: float
    rank: int
    alternatives: tuple[tuple[int, float], ...] = ()

    def to_proto(self) -> common_pb2.TokenLogProb:
        from graftree.v1 import common_pb2  # sampling itself runs where protobuf is not installed

        return common_pb2.TokenLogProb(
            token_id=self.token_id,
            log_prob=self.log_prob,
            rank=self.rank,
            alternatives=[
                common_pb2.TokenLogProb.Alternative(token_id=token, log_prob=value)
                for token, value in self.alternatives
            ],
        )


def process(logits: ArrayLike, params: SamplingParams, context: SamplingContext, path: Sequence[int] = ()) -> Floats:
    """The distribution a token is drawn from, steps 0 to 11 of the module's list.

    Args:
        logits: (V,) the model's logits at the node; not changed.
        params: validated parameters.
        context: the committed sequence.
        path: tokens from the root's child down to the node, inclusive; empty at the root.

    Returns:
        (V,) float64 log probabilities, -inf for tokens that were removed. At temperature 0 the distribution behind
        step 7, whose argmax is the answer.

    Raises:
        GraftreeError: the model's logits hold NaN or infinity.
        InvalidArgument: the options leave no token here.
    """
    scores = np.array(logits, dtype=np.float64)
    best = scores.max()
    scores[context.token_count :] = -math.inf
    if context.constraint is not None:
        scores[~context.constraint.allowed(path)] = -math.inf
    _restrict(scores, params, context, path)
    scores[context.banned(path)] = -math.inf
    if params.logit_bias:
        tokens, biases = params.biases
        scores[tokens] += biases
    if params.penalised:
        _penalise(scores, params, context, path)
    if math.isfinite(best) and scores.max() == -math.inf:
        if context.constraint is None:
            limit = "options that leave a token to choose behind every output"
            raise InvalidArgument("sampling", "no token is left to choose", limit)
        limit = "a constraint that the other options (min_new_tokens, bad_words, logit_bias, ...) leave a token for"
        raise InvalidArgument("structured_output", "no token is left to choose", limit)
    if params.greedy:
        return log_softmax(scores)
    scores /= params.temperature
    if params.min_p > 0:
        scores[scores < scores.max() + math.log(params.min_p)] = -math.inf
    if 0 < params.top_k < scores.size:
        scores[scores < _largest(scores, params.top_k)] = -math.inf
    if params.top_p < 1:
        scores = _nucleus(log_softmax(scores), params.top_p)
    return log_softmax(scores)


def pick(log_probs: Floats, params: SamplingParams, position: int) -> int:
    """The token t of `process`'s distribution: argmax, or at a temperature argmax(log p + Gumbel noise).

    Args:
        log_probs: (V,) from `process`.
        params: `seed` must be set unless they are greedy.
        position: absolute position of the token being chosen.
    """
    if params.greedy:
        return int(np.argmax(log_probs))
    assert params.seed is not None, "whoever opens a session draws its seed"
    candidates = np.flatnonzero(log_probs > -math.inf)
    kept = log_probs if candidates.size == log_probs.size else log_probs[candidates]
    return int(candidates[np.argmax(kept + noise.gumbel(params.seed, position, candidates))])


def choose(logits: NDArray[Any], params: SamplingParams, context: SamplingContext, path: Sequence[int] = ()) -> int:
    """`pick` from `process`: the token that follows `path`, as plain decoding would choose it there.

    Raises:
        GraftreeError: as `process`.
    """
    plain = params.greedy and not params.changes_argmax and context.constraint is None
    if plain and not context.banned(path).size:
        token = int(np.argmax(logits[: context.token_count]))  # the first NaN counts as the maximum
        if not math.isfinite(logits[token]):
            raise GraftreeError("the model's logits are not finite")
        return token
    return pick(process(logits, params, context, path), params, len(context) + len(path))


def describe(logits: ArrayLike, token_id: int, alternatives: int = 0) -> TokenLogProb:
    """Log probability and rank of a token, and the best alternatives.

    Args:
        logits: (V,) the model's logits where the token was chosen, or what `process` made of them: it says which
            distribution is meant. Tokens that were removed are no alternatives.
        token_id: the token.
        alternatives: how many to list.
    """
    log_probs = log_softmax(np.asarray(logits, dtype=np.float64))
    own = log_probs[token_id]
    rank = 1 + int((log_probs > own).sum()) + int((log_probs[:token_id] == own).sum())
    best = _best_first(log_probs, alternatives)
    return TokenLogProb(token_id, float(own), rank, tuple((int(token), float(log_probs[token])) for token in best))


def log_softmax(scores: Floats) -> Floats:
    """(V,) normalised log probabilities of scores in which -inf means removed.

    Raises:
        GraftreeError: a score is NaN or +inf, or every score is -inf.
    """
    top = scores.max()
    if not math.isfinite(top):
        raise GraftreeError("the model's logits are not finite, or no token is left to choose")
    shifted = scores - top
    normalised: Floats = shifted - math.log(np.exp(shifted).sum())
    return normalised


def _restrict(scores: Floats, params: SamplingParams, context: SamplingContext, path: Sequence[int]) -> None:
    if params.allowed_token_ids:
        kept = scores[params.allowed_ids]
        scores[:] = -math.inf
        scores[params.allowed_ids] = kept
    scores[params.banned_ids] = -math.inf
    for length, phrases in params.phrases.items():
        scores[phrases.get(context.tail(path, length), [])] = -math.inf


def _penalise(scores: Floats, params: SamplingParams, context: SamplingContext, path: Sequence[int]) -> None:
    counts = context.counts(path)
    if params.repetition_penalty != 1:
        seen = np.flatnonzero(context.in_prompt() | (counts > 0))
        values = scores[seen]
        scores[seen] = np.where(values > 0, values / params.repetition_penalty, values * params.repetition_penalty)
    used = np.flatnonzero(counts)
    scores[used] -= params.frequency_penalty * counts[used]
    scores[used] -= params.presence_penalty


def _nucleus(log_probs: Floats, top_p: float) -> Floats:
    """Keep the most likely tokens, in order, while those before them hold less than `top_p`."""
    for size in (_HEAD, log_probs.size):
        order = _best_first(log_probs, size)
        reached = np.cumsum(np.exp(log_probs[order]))
        if reached[-1] >= top_p:
            break
    kept = order[: int(np.searchsorted(reached, top_p)) + 1]
    result = np.full_like(log_probs, -math.inf)
    result[kept] = log_probs[kept]
    return result


def _best_first(log_probs: Floats, count: int) -> NDArray[np.intp]:
    """Ids of the `count` most likely tokens that are left, ties by id."""
    if not count:
        return np.empty(0, np.intp)
    threshold = _largest(log_probs, min(count, log_probs.size))
    candidates = np.flatnonzero(log_probs >= threshold if threshold > -math.inf else log_probs > -math.inf)
    return candidates[np.argsort(-log_probs[candidates], kind="stable")][:count]


def _largest(scores: Floats, count: int) -> float:
    """The `count`-th largest score, 0 < count <= V; from the upper end of the vocabulary alone where that will do."""
    near = scores[scores >= scores.max() - _NEAR]
    return float(np.partition(near if near.size >= count else scores, -count)[-count])
