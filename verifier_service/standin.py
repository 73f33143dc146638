"""`StandInRunner`: an LLM of given step time, for measuring everything around the model.

    standin:?step_ms=5&row_ms=0.5&free_rows=8&vocab=512&context=4096

A forward takes step_ms, and row_ms more for each row beyond the first free_rows.
Its tokenizer is the byte-level one of a random model with the same vocabulary. It keeps no cache: a row's logits
follow from its token and position alone (`graftree.models.standin`).
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from graftree.models.blocks import BlockPool
from graftree.models.runner import Rows
from graftree.models.spec import ModelSpec
from graftree.models.standin import next_token
from graftree.models.uri import ModelUri
from graftree.step_time import StepTime
from graftree.text.tokenizer import Tokenizer

_LEAST_SECONDS = 1e-6
_KV_TOKENS = 1 << 24  # nothing is stored, so the pool may be as large as it likes


class NoCache:
    """Stands where `PagedKV` is: there is nothing to move."""

    def __init__(self, block_size: int) -> None:
        self.block_size = block_size

    def move_rows(self, blocks: Sequence[int], sources: Sequence[int], targets: Sequence[int]) -> None:
        """Nothing."""

    def copy_rows(self, sources: Sequence[int], targets: Sequence[int], rows: Sequence[int]) -> None:
        """Nothing."""


class StandInRunner:
    """`TreeRunner`'s interface on `next_token`.

    Args:
        spec: name and limits it reports.
        step_ms: what a forward takes, in milliseconds.
        row_ms: what each row beyond the first `free_rows` adds.
        kv_tokens, block_size: of the pool that sessions reserve from.
        clock, sleep: seconds.
    """

    def __init__(
        self,
        spec: ModelSpec,
        *,
        step_ms: float,
        row_ms: float = 0.0,
        free_rows: int = 1,
        kv_tokens: int,
        block_size: int,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self.spec = spec
        self.pool = BlockPool(kv_tokens // block_size)
        self.kv = NoCache(block_size)
        self.rows_computed = 0
        self._clock, self._sleep = clock, sleep
        # The model of a step's time allows no 0, and needs a second number of rows for a slope.
        first = max(step_ms / 1000, _LEAST_SECONDS)
        self.step_time = StepTime((free_rows, free_rows + 1), (first, first + row_ms / 1000))

    @classmethod
    def load(cls, uri: str | ModelUri, *, kv_tokens: int, block_size: int) -> StandInRunner:
        """Build from a URI.

        Raises:
            InvalidArgument: field `model`; an unknown option or a value out of range.
        """
        parsed = ModelUri.parse(uri)
        step_ms, row_ms = parsed.options["step_ms"], parsed.options["row_ms"]
        assert isinstance(step_ms, float)
        assert isinstance(row_ms, float)
        vocab = parsed.integer("vocab")
        tokenizer = Tokenizer.load(parsed)
        spec = ModelSpec(
            name=str(parsed),
            fingerprint=hashlib.sha256(f"standin vocab={vocab}".encode()).hexdigest(),
            vocab_fingerprint=tokenizer.vocab_fingerprint,
            vocab_size=vocab,
            max_context=parsed.integer("context"),
            eos_token_ids=tokenizer.eos_token_ids,
            token_count=tokenizer.token_count,
        )
        return cls(
            spec,
            step_ms=step_ms,
            row_ms=row_ms,
            free_rows=parsed.integer("free_rows"),
            kv_tokens=kv_tokens or _KV_TOKENS,
            block_size=block_size,
        )

    def forward(self, batch: Sequence[Rows]) -> list[Tensor]:
        """As `TreeRunner.forward`: logits of 10 at what `next_token` says, 0 elsewhere."""
        count = sum(len(rows.token_ids) for rows in batch)
        end = self._clock() + self.step_time.seconds(count, len(batch))
        outputs = [self._logits(rows) for rows in batch]
        self.rows_computed += count
        if (rest := end - self._clock()) > 0:
            self._sleep(rest)
        return outputs

    def _logits(self, rows: Rows) -> Tensor:
        vocab_size = self.spec.vocab_size
        logits = torch.zeros((len(rows.logits), vocab_size))
        for line, row in enumerate(rows.logits):
            logits[line, next_token(rows.token_ids[row], rows.positions[row] + 1, vocab_size)] = 10.0
        return logits
