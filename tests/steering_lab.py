"""Rounds in virtual time: a session's steering and tree over speculators and a verifier of given speed.

Nothing sleeps and nothing is measured, so a run is the same each time. The LLM says token p % 97 at position p; a
speculator grows a chain with siblings, a level at a time, right or wrong as its script says.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

from graftree.step_time import StepTime
from graftree.tree import node_id, root_id
from graftree.v1.speculation_pb2 import TreeDelta
from graftree.v1.verification_pb2 import Verdict
from router.cut import Cut
from router.merge import MergedTree
from router.metrics import Metrics
from router.pace import Pace
from router.priors import Priors
from router.steering import Steering

SALT, VOCAB = 5, 1000
OVERHEAD = 0.001  # seconds of a round beside step and wait
PROMPT = 10


def truth(position: int) -> int:
    return position % 97


@dataclass
class Speculator:
    """Drafts a chain.

    Attributes:
        first: seconds from a commit that leaves nothing of its chain to the first level.
        level: seconds a further level takes.
        right: position -> whether it says what the LLM will say there.
        promise: chance that it gives its tokens.
        width: children a level; the first one counts.
        slows: factor on step times while it drafts.
    """

    kind: str
    first: float = 0.001
    level: float = 0.001
    right: Callable[[int], bool] = lambda position: True
    promise: float = 0.9
    width: int = 1
    depth: int = 8
    slows: float = 1.0
    paused: bool = False
    answered: bool = False
    error: None = None
    chain: list[int] = field(default_factory=list)
    next_at: float = math.inf
    root: int = 0
    position: int = PROMPT

    def commit(self, now: float, root: int, position: int, tokens: list[int], paused: bool) -> None:
        """Follow tokens that were committed; the new root is at `position - 1`."""
        was_paused, self.paused = self.paused, paused
        self.root, self.position = root, position
        survived = not was_paused and self.chain[: len(tokens)] == tokens and len(self.chain) > len(tokens)
        if paused:
            self.chain, self.next_at = [], math.inf
        elif survived:
            self.chain = self.chain[len(tokens) :]
            self.next_at = min(self.next_at, now + self.level) if self.next_at < math.inf else now + self.level
        else:
            self.chain, self.next_at = [], now + self.first

        self.answered = False

    @property
    def latency(self) -> float:
        return self.first

    @property
    def complete(self) -> bool:
        return self.next_at == math.inf

    def grow(self) -> TreeDelta:
        """The next level."""
        parent = self.root
        for token in self.chain:
            parent = node_id(parent, token)
        place = self.position + len(self.chain)
        token = truth(place) if self.right(place) else 500 + place % 97
        delta = TreeDelta()
        for child in range(self.width):
            delta.parent_ids.append(parent)
            delta.token_ids.append(token if child == 0 else 700 + child)
            delta.log_probs.append(math.log(self.promise if child == 0 else (1 - self.promise) / self.width))
        self.chain.append(token)
        self.answered = True
        self.next_at = self.next_at + self.level if len(self.chain) < self.depth else math.inf
        return delta


@dataclass(frozen=True)
class Round:
    """What happened in one round: seconds, tokens, nodes verified, seconds waited, kinds at work."""

    seconds: float
    tokens: int
    nodes: int
    waited: float
    kinds: frozenset[str]


class _Link:
    """What steering reads of a verifier's link."""

    def __init__(self, step_time: StepTime) -> None:
        self.step_time, self.pace = step_time, Pace()


class Lab:
    """One session.

    Args:
        steering: makes the session's, given priors and the virtual clock.
        step_time: true one, and the one that the verifier publishes.
    """

    def __init__(
        self,
        steering: Callable[[Priors, Metrics, Callable[[], float]], Steering],
        step_time: StepTime,
        speculators: list[Speculator],
        *,
        priors: Priors | None = None,
        link: Any = None,
        others: int = 0,
    ) -> None:
        self.now, self.metrics = 0.0, Metrics()
        self.link = link or _Link(step_time)
        priors = priors or Priors()
        self.steering = steering(priors, self.metrics, lambda: self.now)
        self._step_time, self._speculators, self._others = step_time, speculators, others
        self._length = PROMPT
        self._tree = MergedTree(
            root_id(SALT, range(PROMPT)),
            vocab_size=VOCAB,
            max_nodes=1000,
            max_depth=64,
            record=self.steering.record,
            agreement=priors.agreement,
        )
        self.steering.reach(self.link, "session")
        for speculator in speculators:
            self.steering.seated(speculator.kind)
            speculator.commit(0.0, self._tree.root_id, PROMPT, [], paused=False)
        self._waited, self._waited_for = 0.0, frozenset[str]()
        self._cut = self._send()

    @property
    def length(self) -> int:
        """Tokens committed, the prompt's among them."""
        return self._length

    def rounds(self, count: int) -> list[Round]:
        """Play some."""
        return [self._round() for _ in range(count)]

    def _send(self) -> Cut:
        cut = self._tree.cut(self.steering.budget(self._length, self._waited), 32, self.steering.shadows)
        self.steering.sent(cut, self._length, self._waited, self._waited_for)
        return cut

    def _working(self) -> list[Any]:
        return [each for each in self._speculators if self.steering.active(each.kind)]

    def _events(self, until: float) -> Iterator[Speculator]:
        """Speculators whose next level is there, until then."""
        while True:
            ready = min(self._speculators, key=lambda each: each.next_at, default=None)
            if ready is None or ready.next_at > until:
                self.now = max(self.now, until)
                return
            self.now = max(self.now, ready.next_at)
            yield ready

    def _hear(self, speculator: Speculator) -> None:
        if self._tree.add(f"{speculator.kind}/1", speculator.grow()):
            self.steering.heard(speculator.kind, self._tree)

    def _round(self) -> Round:
        begun, cut, waited, kinds = self.now, self._cut, self._waited, self.steering.kinds
        sharing = 1 + self._others
        step = self._step_time.seconds(sharing + len(cut.tree), sharing, 0)
        for speculator in self._speculators:
            step *= 1.0 if speculator.paused else speculator.slows
        for speculator in self._events(self.now + step + OVERHEAD):
            self._hear(speculator)
        tokens, accepted, parent = [truth(self._length)], list[int](), -1
        children = cut.tree.children()
        while (node := children[parent].get(tokens[-1])) is not None:
            accepted.append(node)
            parent = node
            tokens.append(truth(self._length + len(accepted)))
        verdict = Verdict(token_ids=tokens, accepted_nodes=accepted, batch_sessions=sharing)
        verdict.timings.forward_ns = round(step * 1e9)
        self.steering.answered(verdict)
        self._length += len(tokens)
        self._tree.reroot(tokens)
        self._waited, self._waited_for = 0.0, frozenset()
        wait = self.steering.wait(self._tree, self._length, self._working())
        if wait is not None:
            self._commit(tokens)
            self._wait(wait.seconds, wait.tokens)
            self._cut = self._send()
        else:
            self._cut = self._send()
            self._commit(tokens)
        return Round(self.now - begun, len(tokens), len(cut.tree), waited, kinds)

    def _commit(self, tokens: list[int]) -> None:
        self.steering.committed(self._tree)
        for speculator in self._speculators:
            active = self.steering.active(speculator.kind)
            speculator.commit(self.now, self._tree.root_id, self._length, tokens, paused=not active)

    def _wait(self, seconds: float, tokens: float) -> None:
        begun = self.now
        self._waited_for = frozenset(each.kind for each in self.steering.pending(self._working()))
        for speculator in self._events(self.now + seconds):
            self._hear(speculator)
            if self._tree.outlook > tokens or not self.steering.pending(self._working()):
                break
        self._waited = self.now - begun


def rate(rounds: list[Round]) -> float:
    """Tokens per second."""
    return sum(each.tokens for each in rounds) / sum(each.seconds for each in rounds)
