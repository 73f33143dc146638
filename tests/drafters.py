"""Drafters for everybody's tests; a speculator pod takes them as `tests.drafters:Name?key=value`."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Mapping, Sequence
from typing import Any
from urllib.parse import urlencode

from speculator_service.drafters.base import Answer, Candidate, Drafter, DraftSession, Leaf

SURE = math.log(0.99)


def spec(name: str, **options: str) -> str:
    """The drafter spec of a class of this module; options may hold `?` and `&`, as model URIs do."""
    return f"tests.drafters:{name}" + (f"?{urlencode(options)}" if options else "")


class Perfect(Drafter):
    """Drafts what the LLM `model` will say, greedily or under the request's noise: one child per node, surely.

    Args:
        model: the verifier's own URI.
        siblings: children beside the right one, which comes first.
    """

    def __init__(self, model: str, siblings: str = "0") -> None:
        # Drafters without a model must not pay for torch.
        from speculator_service.drafters.model import ModelDrafter

        # The noise can lift any token: rank the whole vocabulary.
        self.inner = ModelDrafter(model, device="cpu", shortlist=1 << 20)
        self.model_fingerprint, self.vocab_fingerprint = self.inner.model_fingerprint, self.inner.vocab_fingerprint
        self.vocab_size, self.max_context = self.inner.vocab_size, self.inner.max_context
        self._children = 1 + int(siblings)

    def open(self, session: DraftSession) -> None:
        self.inner.open(session)

    def commit(self, session_id: str, token_ids: Sequence[int]) -> None:
        self.inner.commit(session_id, token_ids)

    def close(self, session_id: str) -> None:
        self.inner.close(session_id)

    def blocks(self) -> tuple[int, int]:
        return self.inner.blocks()

    def expand(self, leaves: Sequence[Leaf]) -> Sequence[Answer]:
        return [self._sharpen(answer) for answer in self.inner.expand(leaves)]

    def _sharpen(self, answer: Answer) -> Answer:
        if answer is None or isinstance(answer, Exception):
            return answer
        best = answer[: self._children]
        return [Candidate(entry.token_id, SURE if rank == 0 else -6.0 - rank) for rank, entry in enumerate(best)]


class Wrong(Perfect):
    """Never right: drafts the ids after those that the LLM will say, sure of each.

    Args:
        model: the verifier's own URI.
        width: children per node.
    """

    def __init__(self, model: str, width: str = "1") -> None:
        super().__init__(model, siblings="0")
        self._width = int(width)

    def _sharpen(self, answer: Answer) -> Answer:
        right = super()._sharpen(answer)
        if not right or isinstance(right, Exception):
            return right
        token = right[0].token_id
        return [Candidate((token + 1 + i) % self.vocab_size, SURE - i) for i in range(self._width)]


# Trees for `Scripted`, by name: {"5 9": {7: {8: {}}, 3: {}}} = behind a text that ends in tokens 5 9 draft 7 (then 8)
# and 3. A test puts its own here before it starts an in-process pod; "" = whatever the text ends in.
SCRIPTS: dict[str, Mapping[str, Any]] = {}


class Scripted(Drafter):
    """Drafts given trees and nothing else.

    Args:
        name: a key of `SCRIPTS`.
        trees: instead, the same as JSON: {"suffix of the committed tokens": {"token": {subtree}, ...}}. The
            longest suffix that fits wins.
    """

    def __init__(self, name: str = "", trees: str = "") -> None:
        script = json.loads(trees) if trees else SCRIPTS[name]
        self._script = {tuple(map(int, key.split())): tree for key, tree in script.items()}
        self._texts: dict[str, list[int]] = {}

    def open(self, session: DraftSession) -> None:
        self._texts[session.session_id] = list(session.token_ids)

    def commit(self, session_id: str, token_ids: Sequence[int]) -> None:
        self._texts[session_id].extend(token_ids)

    def close(self, session_id: str) -> None:
        del self._texts[session_id]

    def expand(self, leaves: Sequence[Leaf]) -> Sequence[Answer]:
        return [self._children(leaf) for leaf in leaves]

    def _children(self, leaf: Leaf) -> list[Candidate]:
        text = self._texts[leaf.session_id]
        # A tree that a commit has entered goes on where the commit left it.
        for cut in range(len(text), 0, -1):
            fitting = [key for key in self._script if not key or tuple(text[:cut][-len(key) :]) == key]
            for key in sorted(fitting, key=len, reverse=True):
                tree = self._descend(self._script[key], (*text[cut:], *leaf.path))
                if tree is not None:
                    return [Candidate(int(token), SURE - 0.01 * rank) for rank, token in enumerate(tree)]
        return []

    @staticmethod
    def _descend(tree: Mapping[Any, Any], path: Sequence[int]) -> Mapping[Any, Any] | None:
        for token in path:
            below = tree.get(token, tree.get(str(token)))
            if below is None:
                return None
            tree = below
        return tree


# Whole texts, prompts included, that `Oracle` has seen; what was learnt last counts first.
TEXTS: list[list[int]] = []


class Oracle(Drafter):
    """Knows the texts in `TEXTS`: drafts what follows in one that begins as the session's does, and a wrong sibling.

    It takes no time, so that every step has its whole tree.
    """

    inline = True

    def __init__(self) -> None:
        self._committed: dict[str, list[int]] = {}

    def open(self, session: DraftSession) -> None:
        self._committed[session.session_id] = list(session.token_ids)

    def commit(self, session_id: str, token_ids: Sequence[int]) -> None:
        self._committed[session_id].extend(token_ids)

    def close(self, session_id: str) -> None:
        del self._committed[session_id]

    def expand(self, leaves: Sequence[Leaf]) -> Sequence[Answer]:
        return [self._next([*self._committed[leaf.session_id], *leaf.path]) for leaf in leaves]

    @staticmethod
    def _next(text: list[int]) -> list[Candidate]:
        for known in reversed(TEXTS):
            if len(known) > len(text) and known[: len(text)] == text:
                token = known[len(text)]
                return [Candidate(token, SURE), Candidate(token + 1 if token % 2 == 0 else token - 1, -6.0)]
        return []


class Flat(Drafter):
    """`width` children for every leaf, ids from a counter: trees of any size whatever the LLM says."""

    def __init__(self, width: str = "4") -> None:
        self._width = int(width)

    def expand(self, leaves: Sequence[Leaf]) -> Sequence[Answer]:
        first = [(sum(leaf.path) * 7 + leaf.position) % 100 for leaf in leaves]
        return [[Candidate(token + i, -0.5 - 0.1 * i) for i in range(self._width)] for token in first]


class Slow(Flat):
    """As `Flat`, but every step takes `seconds`."""

    def __init__(self, seconds: str = "0.05", width: str = "4") -> None:
        super().__init__(width)
        self._seconds = float(seconds)

    def expand(self, leaves: Sequence[Leaf]) -> Sequence[Answer]:
        time.sleep(self._seconds)
        return super().expand(leaves)


class Crash(Drafter):
    """Raises, in the method named by `where`: open, expand, commit or close; `expand` after `steps` good calls."""

    def __init__(self, where: str = "expand", steps: str = "0") -> None:
        self._where, self._steps = where, int(steps)

    def open(self, session: DraftSession) -> None:
        self._crash("open")

    def expand(self, leaves: Sequence[Leaf]) -> Sequence[Answer]:
        if self._steps <= 0:
            self._crash("expand")
        self._steps -= 1
        return [[Candidate(leaf.position % 50, -1.0)] for leaf in leaves]

    def commit(self, session_id: str, token_ids: Sequence[int]) -> None:
        self._crash("commit")

    def close(self, session_id: str) -> None:
        self._crash("close")

    def _crash(self, where: str) -> None:
        if where == self._where:
            raise RuntimeError("crashed on purpose")


GARBAGE: dict[str, Any] = {
    "none": [None],  # a list whose only candidate is None
    "text": "abc",
    "number": 7,
    "negative": [(-1, -1.0)],
    "nan": [(1, math.nan)],
    "positive": [(1, 0.5)],
    "infinite": [(1, -math.inf)],
    "float": [(1.5, -1.0)],
    "bool": [(True, -1.0)],
    "twice": [(1, -1.0), (1, -2.0)],
    "triple": [(1, -1.0, 3)],
    "string": [("1", -1.0)],
}


class Garbage(Drafter):
    """Answers every leaf with a malformed answer.

    Args:
        kind: a key of `GARBAGE`; `short` = too few answers; `huge` = ids beyond any vocabulary.
    """

    def __init__(self, kind: str = "nan") -> None:
        self._kind = kind

    def expand(self, leaves: Sequence[Leaf]) -> Any:
        if self._kind == "short":
            return []
        if self._kind == "huge":
            return [[Candidate(1 << 40, -1.0)] for _ in leaves]
        return [GARBAGE[self._kind] for _ in leaves]
