"""One session's parts without network and threads: drawing, living trees, merged tree, verifier engine.

Everything between them is a message of the real protocol.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from graftree.acceptance import Rule
from graftree.sampling import SamplingParams
from graftree.tree import root_id
from graftree.v1 import speculation_pb2, verification_pb2
from router.budget import FixedBudget
from router.merge import MergedTree
from speculator_service.drafters.base import Candidate, Drafter, Leaf
from speculator_service.events import Open
from speculator_service.growth import Growth
from speculator_service.limits import Limits
from speculator_service.router_stream import delta_of
from tests.verifier_harness import SALT, Client, Router, make_engine

Path = tuple[int, ...]
Floats = NDArray[np.float64]

LIMITS = Limits(max_sessions=1 << 20, max_nodes=12, max_depth=3, branching=3)


class Table(Drafter):
    """Says `log_q(text)` of every token, the same whatever the session.

    Args:
        log_q: output and path -> (V,), -inf = never.
    """

    def __init__(self, log_q: Callable[[Path], Floats]) -> None:
        self._log_q = log_q
        self.output: Path = ()

    def expand(self, leaves: Sequence[Leaf]) -> list[list[Candidate]]:
        answers = []
        for leaf in leaves:
            log_q = self._log_q((*self.output, *leaf.path))
            order = np.argsort(-log_q, kind="stable")
            answers.append([Candidate(int(t), min(float(log_q[t]), 0.0)) for t in order if log_q[t] > -np.inf])
        return answers


@dataclass
class Speculator:
    """A growth on a drafter of its own, and what it has not sent yet."""

    name: str
    salt: int
    growth: Growth
    drafter: Table
    outbox: list[speculation_pb2.TreeDelta] = field(default_factory=list)

    def grow(self, steps: int) -> None:
        """Expand best leaves; each step's news are a delta of their own."""
        for _ in range(steps):
            for node in self.growth.tree.take(2):
                (candidates,) = self.drafter.expand([self.growth.leaf(node)])
                self.growth.attach(node, candidates)
            event = self.growth.event(0)
            delta = delta_of([event]) if event is not None else None
            if delta is not None:
                self.outbox.append(delta)

    def commit(self, token_ids: Sequence[int]) -> None:
        self.growth.tree.commit(token_ids)
        self.drafter.output += tuple(token_ids)


class Lab:
    """Samples texts with one engine, many sessions at a time.

    Args:
        model: URI of the LLM.
        prompt: of every session.
        length: tokens to sample.
        rule: of acceptance.
        drafters: what each speculator thinks, by its name.
        budget: nodes of a verify step.
    """

    def __init__(
        self,
        model: str,
        prompt: Sequence[int],
        length: int,
        *,
        rule: Rule,
        drafters: dict[str, Callable[[Path], Floats]],
        budget: int = 6,
        vocab: int = 8,
    ) -> None:
        self._prompt, self._length, self._rule = list(prompt), length, rule
        self._drafters, self._budget, self._vocab = drafters, budget, vocab
        self.engine = make_engine(model, kv_tokens=1 << 14, max_sessions=1024, step_tokens=4096)
        self.router = Router(self.engine)
        self.accepted = 0

    def samples(self, params: Sequence[SamplingParams], block: int = 200) -> list[Path]:
        """A text for each of the parameters."""
        texts: list[Path] = []
        for first in range(0, len(params), block):
            sessions = [Session(self, index, own) for index, own in enumerate(params[first : first + block])]
            while any(not session.done for session in sessions):
                going = [session for session in sessions if not session.done]
                for session in going:
                    session.send()
                self.router.run()
                for session in going:
                    session.take()
            for session in sessions:
                texts.append(session.text)
                self.engine.close(self.router.stream, session.client.session_id)
        return texts


class Session:
    """One text: speculators of all kinds, the router's tree, the verifier's session."""

    def __init__(self, lab: Lab, index: int, params: SamplingParams) -> None:
        self._lab, self._params = lab, params
        self._lots = random.Random(params.seed)
        fields = {"max_length": len(lab._prompt) + lab._length, "max_nodes": 32, "mode": lab._rule.to_proto()}
        self.client: Client = lab.router.open(str(index), lab._prompt, params=params, **fields)
        self.tree = MergedTree(
            root_id(SALT, lab._prompt),
            vocab_size=lab._vocab,
            max_nodes=64,
            max_depth=8,
            tests_draws=lab._rule.at(params).tests_draws,
        )
        self.speculators = [
            self._open(name, number, log_q) for number, (name, log_q) in enumerate(lab._drafters.items())
        ]

    def _open(self, name: str, number: int, log_q: Callable[[Path], Floats]) -> Speculator:
        lab = self._lab
        request = speculation_pb2.DraftOpen(
            session_id=name,
            salt=SALT,
            token_ids=lab._prompt,
            prompt_tokens=len(lab._prompt),
            sampling=self._params.to_proto(),
            vocab_size=lab._vocab,
            max_length=len(lab._prompt) + lab._length,
            mode=lab._rule.to_proto(),
            draft_salt=1000 + number,
        )
        session = LIMITS.session(name, request)
        opened = Open(session, LIMITS.tree(session, 0), 0, LIMITS.drawing(session, request))
        return Speculator(name, 1000 + number, Growth(opened), Table(log_q))

    @property
    def text(self) -> Path:
        return tuple(self.client.token_ids[len(self._lab._prompt) :])

    @property
    def done(self) -> bool:
        return len(self.text) >= self._lab._length

    def send(self) -> None:
        """Grow for a while, merge what has arrived, verify the best of it."""
        for speculator in self.speculators:
            speculator.grow(self._lots.randrange(4))
            # What is left waits for the next turn, a commit later.
            arrived, speculator.outbox = speculator.outbox, []
            late = arrived[self._lots.randrange(len(arrived) + 1) :] if self._lots.random() < 0.3 else []
            for delta in arrived[: len(arrived) - len(late)]:
                self.tree.add(speculator.name, delta, salt=speculator.salt)
                if self._lots.random() < 0.2:  # said again
                    self.tree.add(speculator.name, delta, salt=speculator.salt)
            speculator.outbox = late
        room = self._lab._length - len(self.text) - 1
        tree = self.tree.cut(FixedBudget(self._lab._budget), room).tree
        self.client.send(tree, proposals=self.tree.proposals(tree))

    def take(self) -> None:
        """Commit everywhere."""
        verdict: verification_pb2.Verdict = self.client.take()
        assert not verdict.tree_error
        self._lab.accepted += len(verdict.accepted_nodes)
        self.tree.reroot(verdict.token_ids)
        for speculator in self.speculators:
            speculator.commit(verdict.token_ids)
