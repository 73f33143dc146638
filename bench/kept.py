"""`Kept`: an SSM that is asked once about every node, however many trees are grown over the same texts.

What an SSM answers at a node depends on the tokens before it alone. A bench that grows trees of many shapes along one
recorded text therefore opens it once in the SSM, moves it forward with the trees' roots, and keeps the answers below
the foremost root by the nodes' content addresses.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar

from graftree.tree import node_id
from speculator_service.drafters.base import Answer, Drafter, DraftSession, Leaf


@dataclass
class _Text:
    """One text, a session of the inner drafter.

    Attributes:
        root_id: content address of its last token there.
        length: tokens there.
        answers: of the nodes below the root that were asked about.
        parents: of these, the root's own entry included.
        sessions: outer sessions that follow it.
    """

    name: str
    root_id: int
    length: int
    answers: dict[int, Answer] = field(default_factory=dict)
    parents: dict[int, int] = field(default_factory=dict)
    sessions: int = 0


@dataclass
class _Session:
    """An outer session: a tree whose root stands at `root_id`, `length` tokens into the text.

    `news` are the last tokens before the root, as many at least as it is ahead of the text.
    """

    text: _Text
    root_id: int
    length: int
    news: list[int] = field(default_factory=list)


class Kept(Drafter):
    """Answers of another drafter, each asked for once.

    Sessions with the same prompt and sampling parameters are one text. A session may not be asked about a root that
    another session of its text has left behind.

    Args:
        inner: answers by parameters and text alone.
        branching: candidates kept per node; no session may use more.

    Attributes:
        asked, saved: nodes that the inner drafter was asked about, and that it was not.
    """

    inline: ClassVar[bool] = True

    def __init__(self, inner: Drafter, branching: int) -> None:
        self._inner, self._branching = inner, branching
        self.model_fingerprint, self.vocab_fingerprint = inner.model_fingerprint, inner.vocab_fingerprint
        self.vocab_size, self.max_context = inner.vocab_size, inner.max_context
        self.llm_identity = inner.llm_identity
        self._sessions: dict[str, _Session] = {}
        self._texts: dict[tuple[Any, ...], _Text] = {}
        self._opened = 0
        self.asked = self.saved = 0

    def open(self, session: DraftSession) -> None:
        assert session.branching <= self._branching, "more candidates are used than kept"
        prompt, output = session.token_ids[: session.prompt_tokens], session.token_ids[session.prompt_tokens :]
        key = prompt, session.sampling.temperature, session.sampling.seed
        text = self._texts.get(key)
        if text is None:
            self._opened += 1
            text = _Text(f"text-{self._opened}", session.root_id, len(session.token_ids))
            self._inner.open(replace(session, session_id=text.name, branching=self._branching))
            self._texts[key] = text
        text.sessions += 1
        self._sessions[session.session_id] = _Session(text, session.root_id, len(session.token_ids), list(output))

    def commit(self, session_id: str, token_ids: Sequence[int]) -> None:
        session = self._sessions[session_id]
        session.news.extend(token_ids)
        session.length += len(token_ids)
        for token in token_ids:
            session.root_id = node_id(session.root_id, token)

    def close(self, session_id: str) -> None:
        session = self._sessions.pop(session_id, None)
        if session is None:
            return
        text = session.text
        text.sessions -= 1
        if not text.sessions:
            self._inner.close(text.name)
            self._texts = {key: other for key, other in self._texts.items() if other is not text}

    def blocks(self) -> tuple[int, int]:
        return self._inner.blocks()

    def shutdown(self) -> None:
        """Nothing: several engines may use it. `release` ends the inner drafter."""

    def release(self) -> None:
        """End the inner drafter."""
        self._inner.shutdown()

    def expand(self, leaves: Sequence[Leaf]) -> Sequence[Answer]:
        texts = [self._follow(leaf.session_id) for leaf in leaves]
        missing: dict[int, tuple[_Text, Leaf]] = {}
        for text, leaf in zip(texts, leaves, strict=True):
            if leaf.node_id not in text.answers:
                missing[leaf.node_id] = text, leaf._replace(session_id=text.name)
        self.saved += len(leaves) - len(missing)
        if missing:
            self.asked += len(missing)
            # Of one text all or none are its root: below a root without an answer no tree has leaves.
            answers = self._inner.expand([leaf for _, leaf in missing.values()])
            for (text, leaf), answer in zip(missing.values(), answers, strict=True):
                if answer is not None:
                    text.answers[leaf.node_id] = answer
                    text.parents[leaf.node_id] = leaf.parent_id
        return [text.answers.get(leaf.node_id) for text, leaf in zip(texts, leaves, strict=True)]

    def _follow(self, session_id: str) -> _Text:
        """The session's text, moved forward to the session's root."""
        session = self._sessions[session_id]
        text, ahead = session.text, session.length - session.text.length
        assert ahead >= 0, "another tree of this text is further on"
        if ahead:
            self._inner.commit(text.name, session.news[-ahead:])
            text.root_id, text.length = session.root_id, session.length
            self._prune(text)
        session.news.clear()
        assert text.root_id == session.root_id, "trees of one text follow different tokens"
        return text

    @staticmethod
    def _prune(text: _Text) -> None:
        """Keep what lies below the new root, if the root itself was asked about."""
        alive: dict[int, int] = {}
        if text.root_id in text.parents:
            alive[text.root_id] = text.root_id
            for node, parent in text.parents.items():  # parents come before children
                if parent in alive and node != text.root_id:
                    alive[node] = parent
        text.parents = alive
        text.answers = {node: text.answers[node] for node in alive}
