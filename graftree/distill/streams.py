"""`Stream`: one endless dialogue that the LLM has with itself, token by token.

The chat template, rendered with markers in the places of the texts, gives the fixed pieces between turns. In the
user's slot the LLM writes the user's turn itself, begun with one of many openings (self-instruction from the bare
template: Xu et al., "Magpie", arXiv 2406.08464); then it answers. A model without a chat template just writes.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from random import Random
from typing import Protocol

FORCED, USER, ANSWER = 0, 1, 2  # whose token it is: the template's or a prompt's, the user's, the assistant's

# Longest turn that the LLM writes as the user; a quarter of the turns may be longer, e.g. to quote a text.
_USER_TOKENS, _LONG_USER_TOKENS = 80, 240
_MARKERS = ("\ue000", "\ue001", "\ue002")

USER_TEMPERATURE = 1.0  # a user's turn is always drawn, or equal openings would give equal dialogues
# Of an answer, chosen anew for each: a third is what greedy requests will hear.
ANSWER_TEMPERATURES = (0.0, 0.0, 0.0, 0.4, 0.6, 0.8, 0.8, 1.0, 1.0)

# Longest answer. One at temperature 0 ends sooner: small LLMs fall into loops there, and a loop teaches little.
_ANSWER_TOKENS, _GREEDY_ANSWER_TOKENS = 320, 128

# How user turns begin. Kinds of requests, none of their contents; "" leaves even that to the LLM.
OPENINGS: tuple[str, ...] = (
    "", "", "", "", "", "", "", "",
    "What is", "What are", "What does", "What was", "Who is", "Who wrote", "When did", "Where is", "Which", "Why do",
    "Why is", "How do", "How does", "How can I", "How many", "Is it", "Can you", "Could you", "Do you", "Please",
    "Write", "Write a short story", "Write an email", "Write a poem", "Write a Python function", "Write a blog post",
    "Explain", "Describe", "Compare", "List", "Give me", "Tell me", "Summarize", "Summarize the following text:",
    "Translate", "Translate this sentence from German to English:", "Translate the following into English:",
    "Rewrite", "Fix the grammar:", "Classify", "Extract", "Create", "Design", "Plan", "Imagine", "Suppose", "Pretend",
    "Act as", "You are", "Help me", "I need", "I want to", "I have", "My", "Let's", "If", "Given", "In", "The", "A",
    "There are", "Solve", "Calculate", "A store sells", "A train", "John has", "Based on the following passage,",
    "Read the following and answer the question:", "Answer the question using the text:", "Continue:", "Code:",
)  # fmt: skip


class StreamTokenizer(Protocol):
    """What a stream needs of `graftree.text.tokenizer.Tokenizer`."""

    @property
    def eos_token_ids(self) -> Sequence[int]: ...

    @property
    def has_chat_template(self) -> bool: ...

    def encode(self, text: str, *, special_tokens: bool = True) -> list[int]: ...

    def render_chat(self, messages: Sequence[dict[str, str]]) -> str: ...


@dataclass(frozen=True)
class Script:
    """The fixed pieces of a dialogue.

    Attributes:
        start: tokens before the first user turn.
        to_answer, to_user: tokens from the end of a user's turn to the answer, and of an answer to the next turn.
        ends: tokens that end a turn when the LLM says them.
        openings: token lists that user turns begin with.
        chat: whether there are turns at all.
    """

    start: tuple[int, ...]
    to_answer: tuple[int, ...]
    to_user: tuple[int, ...]
    ends: frozenset[int]
    openings: tuple[tuple[int, ...], ...]
    chat: bool

    @classmethod
    def of(cls, tokenizer: StreamTokenizer) -> Script:
        """The script of a model's chat template; of plain text where it has none."""
        ends = frozenset(tokenizer.eos_token_ids)
        encode = tokenizer.encode
        openings = tuple(tuple(encode(text, special_tokens=False)) if text else () for text in OPENINGS)
        pieces = _pieces(tokenizer) if tokenizer.has_chat_template else None
        if pieces is None:
            start = tuple(encode("")) or openings[-1] or (0,)
            return cls(start, (), (), ends, openings, False)
        start, to_answer, to_user = (tuple(encode(piece, special_tokens=False)) for piece in pieces)
        return cls(start, to_answer, to_user, ends, openings, bool(start and to_answer and to_user))


def _pieces(tokenizer: StreamTokenizer) -> tuple[str, str, str] | None:
    """Template text before the first user turn, from it to the answer, and from the answer to the next user turn."""
    first, answer, second = _MARKERS
    roles = (("user", first), ("assistant", answer), ("user", second))
    rendered = tokenizer.render_chat([{"role": role, "content": text} for role, text in roles])
    places = [rendered.find(marker) for marker in _MARKERS]
    if -1 in places or places != sorted(places):
        return None
    return rendered[: places[0]], rendered[places[0] + 1 : places[1]], rendered[places[1] + 1 : places[2]]


class Stream:
    """Decides who says a stream's next token, and whether the LLM is asked at all.

    Args:
        script: of the model.
        random: of this stream.
        prompts: token lists for user turns, shared by all streams; when none is left the LLM writes them.
    """

    def __init__(self, script: Script, random: Random, prompts: Iterator[Sequence[int]]) -> None:
        self._script, self._random, self._prompts = script, random, prompts
        self._forced: deque[int] = deque(script.start)
        self._role = ANSWER
        self._left = 0
        self._temperature = random.choice(ANSWER_TEMPERATURES)
        if script.chat:
            self._begin_user()
        else:
            self._forced.extend(random.choice(script.openings))

    @property
    def temperature(self) -> float:
        """Of the LLM's next draw."""
        return USER_TEMPERATURE if self._role == USER else self._temperature

    def next(self, sampled: int) -> tuple[int, int]:
        """The next token and whose it is.

        Args:
            sampled: what the LLM would say here.
        """
        if self._forced:
            return self._forced.popleft(), FORCED
        if not self._script.chat:
            if sampled in self._script.ends:
                self._forced.extend(self._script.start[1:])
                self._forced.extend(self._random.choice(self._script.openings))
                return self._script.start[0], FORCED
            return sampled, ANSWER
        role = self._role
        self._left -= 1
        if sampled not in self._script.ends and self._left > 0:
            return sampled, role
        piece = self._script.to_answer if role == USER else self._script.to_user
        said = sampled in self._script.ends
        self._forced.extend(piece[1:])
        if role == USER:
            self._begin_answer()
        else:
            self._begin_user()
        # The template's own end of turn takes the place of whatever token the LLM ended it with.
        return piece[0], role if said else FORCED

    def _begin_user(self) -> None:
        prompt = next(self._prompts, None)
        if prompt is not None:
            self._forced.extend(prompt)
            self._forced.extend(self._script.to_answer)
            self._begin_answer()
            return
        self._role = USER
        self._left = _LONG_USER_TOKENS if self._random.random() < 0.25 else _USER_TOKENS
        self._forced.extend(self._random.choice(self._script.openings))

    def _begin_answer(self) -> None:
        self._role = ANSWER
        self._temperature = self._random.choice(ANSWER_TEMPERATURES)
        self._left = _ANSWER_TOKENS if self._temperature else _GREEDY_ANSWER_TOKENS
