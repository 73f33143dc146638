"""`Turncoat`: a drafter that is wrong, then right, then wrong again; for measuring what the router makes of it."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Sequence
from pathlib import Path

from speculator_service.drafters.base import Answer, Candidate, Drafter, DraftSession, Leaf

SURE = 0.97


class Turncoat(Drafter):
    """Knows whole texts, and says what follows in them or what does not, always equally sure.

    Args:
        texts: file with a JSON list of token id lists, prompts included.
        turns: output positions at which it turns, wrong at first: "120,720" is right from 120 to 719.
        step_ms: what one `expand` takes, in milliseconds.
        burn: "1" = a processor is busy meanwhile, as with an SSM on the same machine; "0" = it sleeps.
        width: children of a node.
    """

    def __init__(self, texts: str, turns: str = "", step_ms: str = "2", burn: str = "0", width: str = "2") -> None:
        self._texts: list[list[int]] = json.loads(Path(texts).read_text())
        self._turns = [int(turn) for turn in turns.split(",") if turn]
        self._seconds, self._burn, self._width = float(step_ms) / 1000, burn == "1", int(width)
        self._open: dict[str, tuple[list[int], int, int]] = {}

    def open(self, session: DraftSession) -> None:
        begun = list(session.token_ids)
        text = next((text for text in self._texts if text[: len(begun)] == begun), begun)
        self._open[session.session_id] = text, session.prompt_tokens, session.vocab_size

    def close(self, session_id: str) -> None:
        self._open.pop(session_id, None)

    def expand(self, leaves: Sequence[Leaf]) -> Sequence[Answer]:
        end = time.perf_counter() + self._seconds
        if not self._burn:
            time.sleep(self._seconds)
        answers: list[Answer] = [self._children(leaf) for leaf in leaves]
        while time.perf_counter() < end:
            pass
        return answers

    def _children(self, leaf: Leaf) -> list[Candidate]:
        text, prompt_tokens, vocab_size = self._open[leaf.session_id]
        if leaf.position >= len(text):
            return []
        right = sum(leaf.position - prompt_tokens >= turn for turn in self._turns) % 2 == 1
        first = text[leaf.position] + (0 if right else 1)
        shares = [SURE] + [(1 - SURE) / self._width] * (self._width - 1)
        return [
            Candidate((first + place * (2 if place else 1)) % vocab_size, math.log(share))
            for place, share in enumerate(shares)
        ]
