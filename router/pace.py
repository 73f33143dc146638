"""`Pace`: what rounds take on one verifier; `Rounds`: one session's share in it.

    round = overhead + wait for drafts + stretch(speculators at work) * step time(rows, sequences, context)

Step times are the verifier's own word (`graftree.step_time`). What it cannot know is measured here: the way there and
back, and how much slower a step is while certain speculators draft, which may be on the same machine.
"""

from __future__ import annotations

from dataclasses import dataclass

from graftree.step_time import StepTime
from graftree.v1.verification_pb2 import Verdict
from router.budget import StepTable
from router.ema import Mean

Roster = frozenset[str]  # kinds of speculators that draft for a session

FIRST_GUESS = 0.02  # seconds a step takes where nobody has said so and none was seen
STRETCH = (0.25, 4.0)
# A stretch says something once this many steps were seen.
ENOUGH = 3
RARELY, NOTHING = 8, 0.1
AT_ONCE = 1 << 20
ALONE = 1.5  # sequences a step, on average, below which a session has the verifier to itself
# Rows and sequences of a step that are looked at one by one. Beyond them a row more costs what the last one did, so a
# step is taken for one of so many, with its tokens in proportion.
MOST_ROWS, MOST_SEQUENCES = 512, 1024
_TABLES = 32


@dataclass(frozen=True, slots=True)
class Others:
    """What other sessions bring into a step: rows, and the tokens expected of them."""

    rows: int = 0
    tokens: float = 0.0
    context: int = 0


class Pace:
    """One verifier's, shared by all sessions of this router there.

    Attributes:
        overhead: seconds of a round beyond step and wait, over all sessions: what a new one begins with.
        steps: steps seen by sessions that had the verifier to themselves.
    """

    def __init__(self) -> None:
        self.overhead = Mean(0.1)
        self.steps = 0
        self._flat = Mean(0.1, FIRST_GUESS)
        self._own = StepTime.flat(FIRST_GUESS)
        self._step_time: StepTime | None = None
        self._tables: dict[tuple[int, int], StepTable] = {}
        self._stretch: dict[Roster, Mean] = {}
        self._seen: dict[Roster, int] = {}  # `steps` when the roster was last seen
        self._shares: dict[str, Others] = {}
        self._rows, self._tokens, self._context = 0, 0.0, 0

    # Who shares a step.

    def brings(self, wire_id: str, share: Others) -> None:
        """A session sends a step with so much in it."""
        self.leave(wire_id)
        self._shares[wire_id] = share
        self._rows += share.rows
        self._tokens += share.tokens
        self._context += share.context

    def leave(self, wire_id: str) -> None:
        """A session sends no more steps."""
        if (share := self._shares.pop(wire_id, None)) is not None:
            self._rows -= share.rows
            self._tokens -= share.tokens
            self._context -= share.context

    def others(self, wire_id: str, sequences: float, own: Others) -> Others:
        """What the others among `sequences` bring, if they are like those known here; else like `own`."""
        mine = self._shares.get(wire_id, Others())
        count = len(self._shares) - (wire_id in self._shares)
        share = max(0.0, sequences - 1.0)
        all_of_them = own
        if count:
            share /= count
            all_of_them = Others(self._rows - mine.rows, self._tokens - mine.tokens, self._context - mine.context)
        if share * all_of_them.rows > MOST_ROWS:
            share = MOST_ROWS / all_of_them.rows
        return Others(round(share * all_of_them.rows), share * all_of_them.tokens, round(share * all_of_them.context))

    # What a step takes.

    def table(self, step_time: StepTime | None, sequences: int, context: int) -> StepTable:
        """Step time by rows at a load; `sequences` and `context` count to within an eighth.

        Args:
            step_time: the verifier's word; None = it has not said.
        """
        if step_time is None:
            if abs(self._own.curve[0] - self._flat.value) > 0.1 * self._own.curve[0]:
                self._own = StepTime.flat(max(self._flat.value, 1e-6))
            step_time = self._own
        if step_time is not self._step_time:
            self._adopt(step_time)
        sequences, context = _rounded(sequences, 1), _rounded(context, 16)
        table = self._tables.get((sequences, context))
        if table is None:
            if len(self._tables) >= _TABLES:
                self._tables.pop(next(iter(self._tables)))
            table = StepTable(lambda rows: step_time.seconds(rows, sequences, context))
            self._tables[sequences, context] = table
        return table

    def _adopt(self, step_time: StepTime) -> None:
        """Another word on step times; a stretch is relative to it."""
        if self._step_time is not None:
            ratio = self._step_time.seconds(8) / step_time.seconds(8)
            for mean in self._stretch.values():
                mean.value *= ratio
        self._step_time = step_time
        self._tables.clear()

    def observe_step(self, roster: Roster, predicted: float, seconds: float) -> None:
        """A step of a session that had the verifier to itself took so long."""
        self.steps += 1
        self._flat.observe(seconds)
        low, high = STRETCH
        self._stretch.setdefault(roster, Mean(0.1)).observe(min(max(seconds / predicted, low), high))
        self._seen[roster] = self.steps

    def stretch(self, roster: Roster) -> float | None:
        """Factor on step times while these speculators draft; None = not known."""
        mean = self._stretch.get(roster)
        return mean.value if mean is not None and mean.count >= ENOUGH else None

    def unseen(self, roster: Roster) -> int:
        """Steps since these speculators, and no others, were last at work; all there were, if never often enough."""
        return self.steps - (self._seen[roster] if self.stretch(roster) is not None else 0)


@dataclass(frozen=True, slots=True)
class Costs:
    """What the next step costs, before a decision on its tree.

    Attributes:
        table: step time by rows under the present load.
        rows: of the step without a tree: the session's root, and what others bring.
        tokens: of the step without a tree: the bonus token, and what others expect.
        overhead: seconds of the round beyond step and wait.
        stretch: factor on step times while the session's speculators draft.
        alone: the session has the verifier to itself.
    """

    table: StepTable
    rows: int
    tokens: float
    overhead: float
    stretch: float
    alone: bool

    def step(self, nodes: int) -> float:
        """Seconds of the step with a tree of so many nodes."""
        self.table.reach(self.rows + nodes)
        return self.stretch * self.table.seconds[self.rows + nodes]


@dataclass(slots=True)
class Sent:
    """A step under way.

    Attributes:
        at: seconds, the session's clock.
        rows: its own, root included.
        tokens: expected of it.
        context: cached tokens of the session.
        waited: seconds the session waited for drafts before it.
    """

    at: float
    roster: Roster
    rows: int
    tokens: float
    context: int
    waited: float


class Rounds:
    """One session's rounds on one verifier, one after the other.

    Args:
        pace: the verifier's.
        wire_id: the session's name there.

    Attributes:
        overhead: seconds of a round beyond step and wait.
        sequences: how many sessions share a step, on average.
        rate: tokens per second of late.
    """

    def __init__(self, pace: Pace, wire_id: str) -> None:
        self.pace, self.wire_id = pace, wire_id
        self.overhead = Mean(0.2, pace.overhead.value)
        self.sequences = Mean(0.3, 1.0)
        self._tokens, self._seconds = Mean(0.2), Mean(0.2)
        self._sent: Sent | None = None
        self._step_seconds = 0.0
        self._begun = False

    @property
    def rate(self) -> float:
        return self._tokens.value / self._seconds.value if self._seconds.value > 0 else 0.0

    def costs(self, step_time: StepTime | None, context: int, roster: Roster) -> Costs:
        """Of the next step.

        Args:
            step_time: the verifier's word on it; None = it has not said.
            context: committed tokens of the session.
            roster: speculators at work for it.
        """
        sent = self._sent
        own = Others(1, 1.0, context) if sent is None else Others(sent.rows, sent.tokens, context)
        alone = self.sequences.value < ALONE
        others = Others() if alone else self.pace.others(self.wire_id, self.sequences.value, own)
        sequences = 1 if alone else round(self.sequences.value)
        return Costs(
            self.pace.table(step_time, sequences, others.context + context),
            1 + others.rows,
            1.0 + others.tokens,
            self.overhead.value,
            (self.pace.stretch(roster) or 1.0) if alone else 1.0,
            alone,
        )

    def contention(self, roster: Roster, kind: str) -> float:
        """Part of a step's time that it takes because `kind` drafts meanwhile; 0 where that is not known."""
        whole, without = self.pace.stretch(roster), self.pace.stretch(roster - {kind})
        return max(0.0, whole - without) if whole is not None and without is not None else 0.0

    def unseen(self, roster: Roster) -> int:
        """As `Pace.unseen`; 0 where step times say nothing about speculators: other sessions have theirs."""
        now = self.pace.stretch(self._sent.roster) if self._sent is not None else None
        if now is None or self.sequences.value >= ALONE:
            return 0
        steps, known = self.pace.unseen(roster), self.pace.stretch(roster)
        # What the verifier has said of its steps holds for those without speculators, until they are seen.
        if now < (1.0 if known is None else known) * (1 + NOTHING):
            return steps // RARELY  # they cost it nothing: once in a while is enough
        return AT_ONCE if known is None else steps

    def sent(self, sent: Sent) -> None:
        """A step leaves; it ends the round of the one before."""
        if self._sent is not None and self._step_seconds > 0.0:
            seconds = sent.at - self._sent.at
            self._seconds.observe(seconds)
            overhead = max(0.0, seconds - sent.waited - self._step_seconds)
            self.overhead.observe(overhead)
            self.pace.overhead.observe(overhead)
        self._sent, self._step_seconds = sent, 0.0
        self.pace.brings(self.wire_id, Others(sent.rows, sent.tokens, sent.context))

    def answered(self, verdict: Verdict, step_time: StepTime | None, tokens: int) -> None:
        """The verdict on the step under way.

        Args:
            tokens: accepted ones and the bonus token.
        """
        sent, timings = self._sent, verdict.timings
        begun, self._begun = self._begun, True
        if sent is None or not begun:  # the first step has the prompt in it
            return
        self._step_seconds = max(timings.forward_ns / 1e9, 1e-9)
        self._tokens.observe(tokens)
        sequences = min(max(1, verdict.batch_sessions), MOST_SEQUENCES)
        self.sequences.observe(sequences)
        if sequences == 1 and timings.forward_ns:
            table = self.pace.table(step_time, 1, sent.context)
            table.reach(sent.rows)
            self.pace.observe_step(sent.roster, table.seconds[sent.rows], self._step_seconds)

    def close(self) -> None:
        self.pace.leave(self.wire_id)


def _rounded(number: int, least: int) -> int:
    """Down to within an eighth, and to a multiple of `least`, a power of two."""
    step = max(least, 1 << max(0, number.bit_length() - 4))
    return number // step * step
