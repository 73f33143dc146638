"""Replayed trees are the service's: same steps, same nodes, same tokens accepted; and an SSM is asked once a node."""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from typing import Any

import pytest

from bench.kept import Kept
from bench.recording import Prompt, Recording
from bench.replay import Setting
from bench.stand import Stand
from graftree import Client, LocalStack
from graftree.config import SpeculatorConfig, build
from graftree.noise import mix64
from graftree.tree import node_id
from graftree.v1.verification_pb2 import Verdict
from router.merge import MergedTree
from router.patience import Wait
from router.session import Session
from router.speculator_seat import SpeculatorSeat
from router.steering import FixedSteering
from speculator_service.drafters import loader
from speculator_service.drafters.base import Answer, Candidate, Drafter, DraftSession, Leaf

LLM = "random:llama?layers=2&hidden=32&heads=2&kv_heads=1&intermediate=64&vocab=300&context=256"
SSM = f"model:{LLM}&keep=0"
BUDGET, DEPTH, LENGTH = 8, 6, 24


def recording(prompt: Sequence[int], output: Sequence[int], *, temperature: float = 0.0, seed: int = 0) -> Recording:
    return Recording(Prompt(seed, "any", tuple(prompt)), tuple(output), temperature, seed, False)


class Strict(Drafter):
    """Answers by the text alone, and insists on what drafters are promised; counts how often it is asked."""

    vocab_size, model_fingerprint = 50, "strict"

    def __init__(self) -> None:
        self.asked: list[tuple[int, ...]] = []
        self.sessions: dict[str, tuple[DraftSession, list[int]]] = {}
        self._expanded: dict[str, set[int]] = {}
        self._roots: dict[str, int] = {}

    def open(self, session: DraftSession) -> None:
        assert session.session_id not in self.sessions
        self.sessions[session.session_id] = session, list(session.token_ids)
        self._expanded[session.session_id], self._roots[session.session_id] = set(), session.root_id

    def commit(self, session_id: str, token_ids: Sequence[int]) -> None:
        self.sessions[session_id][1].extend(token_ids)
        for token in token_ids:
            self._roots[session_id] = node_id(self._roots[session_id], token)

    def close(self, session_id: str) -> None:
        del self.sessions[session_id]

    def expand(self, leaves: Sequence[Leaf]) -> Sequence[Answer]:
        return [self._answer(leaf) for leaf in leaves]

    def _answer(self, leaf: Leaf) -> Answer:
        given, committed = self.sessions[leaf.session_id]
        root, expanded = self._roots[leaf.session_id], self._expanded[leaf.session_id]
        assert leaf.position == len(committed) + len(leaf.path)
        assert leaf.path or leaf.node_id == root
        assert not leaf.path or leaf.parent_id in expanded
        expanded.add(leaf.node_id)
        text = (*committed, *leaf.path)
        self.asked.append(text)
        lot = mix64(hash(text[-3:]) & (1 << 64) - 1)
        tokens = dict.fromkeys((lot >> 8 * i) % 50 for i in range(4))
        return [Candidate(token, math.log(0.5 / 2**rank)) for rank, token in enumerate(tokens)][: given.branching]


def said_by(drafter: Strict, prompt: Sequence[int], misses: int) -> list[int]:
    """A text that follows the drafter's best guess, but for every `misses`-th token."""
    session = DraftSession("", 0, tuple(prompt), len(prompt), None, 50, 999, 9, 4)  # type: ignore[arg-type]
    drafter.open(session)
    output: list[int] = []
    while len(output) < 30:
        answer: Any = drafter.expand([Leaf("", 0, 0, (), len(prompt) + len(output))])[0]
        output.append(answer[len(output) % misses == 0][0])
        drafter.sessions[""][1].append(output[-1])
    drafter.close("")
    return output


SETTINGS = [
    Setting(("ssm",), "best_first", 4, 4),
    Setting(("ssm",), "best_first", 12, 8),
    Setting(("ssm",), "static:1,2,1", 5, 3),
    Setting(("ssm",), "cartesian:3,1", 6, 2),
    Setting(("ssm", "ngram"), "best_first", 6, 4),
    Setting(("ssm",), "static:3", 3, 1, forced=True),
]


def test_many_trees_along_one_text_ask_a_node_once_and_are_the_trees_they_are_alone() -> None:
    """Through `Kept`, side by side, against a drafter of their own for each setting; every promise to it is kept."""
    texts = [([1, 2, 3], 3), ([4, 5], 5), ([7] * 9, 29)]
    recordings = [recording(prompt, said_by(Strict(), prompt, misses)) for prompt, misses in texts]
    inner = Strict()
    ngram = loader.load(build(SpeculatorConfig, {"drafter": "ngram"}))
    with Stand({"ssm": Kept(inner, 32), "ngram": ngram}, {}, 50) as stand:
        together = stand.replay(recordings, SETTINGS, horizon=26)
    assert len(inner.asked) == len(set(inner.asked))
    assert not inner.sessions
    for setting in SETTINGS:
        with Stand({"ssm": Strict(), "ngram": ngram}, {}, 50) as stand:
            alone = stand.replay(recordings, [setting], horizon=26)[setting]
        assert [walk.steps for walk in together[setting]] == [walk.steps for walk in alone]
        steps = [step for walk in alone for step in walk.steps]
        assert max(step.drafted for step in steps) <= setting.budget
        assert setting.forced or max(step.accepted for step in steps) > 1
        assert all(sum(step.delivered for step in walk.steps) >= 26 for walk in alone)


@pytest.fixture
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """The router waits until every speculator has grown its tree to the end, before and behind every commit."""

    def pending(self: FixedSteering, seats: Collection[SpeculatorSeat]) -> list[SpeculatorSeat]:
        return [seat for seat in seats if not seat.complete]

    def wait(self: FixedSteering, tree: MergedTree, length: int, seats: Collection[SpeculatorSeat]) -> Wait | None:
        return Wait(60.0, math.inf) if seats else None

    async def verdict(self: Session) -> Verdict:
        answer = await original(self)
        while self._drafts._steering.pending(self._drafts._working()):
            self._drafts._news.clear()
            await self._drafts._news.wait()
        return answer

    original = Session._verdict
    monkeypatch.setattr(FixedSteering, "pending", pending)
    monkeypatch.setattr(FixedSteering, "wait", wait)
    monkeypatch.setattr(Session, "_verdict", verdict)


@pytest.mark.usefixtures("patient")
def test_a_replay_takes_the_steps_of_the_service() -> None:
    """Steps, drafts and accepted tokens of requests through a stack whose router waits for whole trees."""
    options = {"tree_budget": BUDGET, "tree_depth": DEPTH, "adaptive": False}
    requests = [([3, 1, 4, 1, 5], 0.0, 1), ([9, 2, 6, 9, 2], 1.0, 2), ([5, 3, 5, 8], 1.0, 3)]
    with (
        LocalStack(LLM, ["ngram", SSM], in_process=True, threads=1, router_options=options) as stack,
        Client(stack.target) as client,
    ):
        results = [
            client.generate(
                token_ids=prompt, temperature=temperature, seed=seed, max_new_tokens=LENGTH, ignore_eos=True
            )
            for prompt, temperature, seed in requests
        ]
    setting = Setting(("ngram", SSM), "best_first", BUDGET, DEPTH)
    drafters = {
        spec: loader.load(build(SpeculatorConfig, {"drafter": spec, "device": "cpu"})) for spec in setting.speculators
    }
    accepted = 0
    with Stand({**drafters, SSM: Kept(drafters[SSM], 32)}, {}, 300) as stand:
        for (prompt, temperature, seed), result in zip(requests, results, strict=True):
            text = recording(prompt, result.token_ids, temperature=temperature, seed=seed)
            ((walk,),) = stand.replay([text], [setting], horizon=LENGTH).values()
            stats, steps = result.speculation, walk.steps
            drafted = [step.drafted for step in steps]
            assert stats.num_spec_steps == len(steps)
            assert stats.draft_histogram == tuple(drafted.count(n) for n in range(max(drafted) + 1))
            assert stats.num_accepted_tokens == sum(step.accepted for step in steps)
            assert stats.mean_acceptance_length == sum(step.delivered for step in steps) / len(steps)
            accepted += stats.num_accepted_tokens
    assert accepted > len(requests)
