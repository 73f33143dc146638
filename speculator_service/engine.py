"""`Engine`: grows the living trees of all sessions with one drafter.

A turn applies what arrived, hands out what entered the trees, expands the best leaves of all sessions in one call of
the drafter, and does the first two again. Turns go on while any tree can grow, whatever the verifier does meanwhile;
then the engine sleeps. They run on a thread of their own or, for a drafter that takes microseconds, on the event
loop. Nothing here blocks the loop, and one session's failure ends that session alone.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Iterable

import structlog

from graftree.calibration import Calibration
from graftree.errors import GraftreeError, NotFound, Stale
from graftree.observe.histogram import ITL_SECONDS, Histogram
from speculator_service.drafters.base import Drafter, Leaf
from speculator_service.drafters.checks import BadAnswer, check_answer, check_answers
from speculator_service.events import Commit, Event, Failed, Open, Operation
from speculator_service.growth import Growth
from speculator_service.living_tree import Node

_ENTERING = 4  # children of a leaf that are likely enough to enter a tree, about
_INLINE_BURST = 4  # steps on the event loop before others get their turn
_SEND_ROUNDS = 3  # of the event loop, in which a stream's writer wakes, gathers and sends
_STOP_SECONDS = 5.0  # longest wait for a step that is under way

log = structlog.get_logger(__name__)


class Engine:
    """Runs a drafter over many sessions.

    Args:
        drafter: what guesses; used by this engine alone.
        batch_leaves: most leaves of one drafter call.
        deliver: takes the events of a turn, on the event loop, in order.
        clock: monotonic nanoseconds.

    Attributes:
        priors: how right the drafter has been in all sessions, by how children are chosen: greedily, under the
            verifier's noise, or drawn by a rule.
    """

    def __init__(
        self,
        drafter: Drafter,
        *,
        batch_leaves: int,
        deliver: Callable[[list[Event]], None],
        clock: Callable[[], int] = time.monotonic_ns,
    ) -> None:
        self._drafter, self._batch_leaves = drafter, batch_leaves
        self._deliver, self._clock = deliver, clock
        self._inbox: deque[Operation] = deque()
        self._growths: dict[str, Growth] = {}
        self.priors: dict[str, Calibration] = {}
        self._events: list[Event] = []
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread: threading.Thread | None = None
        self._wake = threading.Condition()
        self._scheduled = False
        self._stopped = False
        self.steps = 0
        self.leaves_expanded = 0
        self.foreseen = 0  # committed tokens that had been sent as drafts
        self.drafting_ns = 0  # in the drafter
        self.waits = Histogram(ITL_SECONDS)  # from an open's or a commit's arrival to its first step
        self.faults: Counter[str] = Counter()

    def start(self) -> None:
        """Begin to work for the running event loop."""
        self._loop = asyncio.get_running_loop()
        if not self._drafter.inline:
            self._thread = threading.Thread(target=self._run, name="drafter", daemon=True)
            self._thread.start()

    async def stop(self) -> None:
        """End the thread, forget all sessions, release the drafter."""
        self._stopped = True
        with self._wake:
            self._wake.notify()
        if self._thread is not None:
            await asyncio.to_thread(self._thread.join, _STOP_SECONDS)
            if self._thread.is_alive():  # a drafter that hangs keeps its memory; the thread is a daemon
                return
        for session_id in list(self._growths):
            self._forget(session_id)
        self._drafter.shutdown()

    def submit(self, operations: Iterable[Operation]) -> None:
        """Queue operations in order; called on the event loop."""
        self._inbox.extend(operations)
        if not self._inbox or self._stopped:
            return
        if self._drafter.inline:
            self._schedule()
        else:
            with self._wake:
                self._wake.notify()

    @property
    def queued(self) -> int:
        """Operations that wait to be applied."""
        return len(self._inbox)

    # Two ways to take turns.

    def _run(self) -> None:
        assert self._loop is not None
        while True:
            with self._wake:
                while not (self._stopped or self._inbox or self._can_grow()):
                    self._wake.wait()
            if self._stopped:
                return
            self._turn(self._hand_over)

    def _hand_over(self, events: list[Event]) -> None:
        assert self._loop is not None
        if not self._stopped:
            self._loop.call_soon_threadsafe(self._deliver, events)

    def _schedule(self, rounds: int = 0) -> None:
        if not self._scheduled:
            self._scheduled = True
            self._inline_turn(rounds)

    def _inline_turn(self, rounds: int) -> None:
        """Take turns after `rounds` more rounds of the event loop."""
        assert self._loop is not None
        if self._stopped:
            return
        if rounds >= 0:
            self._loop.call_soon(self._inline_turn, rounds - 1)
            return
        self._scheduled = False
        # A commit is answered after one step; what grows then travels a few steps at a time.
        for _ in range(1 if self._inbox else _INLINE_BURST):
            self._turn(self._deliver)
            if not self._can_grow():
                break
        if self._inbox or self._can_grow():
            self._schedule(_SEND_ROUNDS)

    # A turn.

    def _turn(self, deliver: Callable[[list[Event]], None]) -> None:
        try:
            self._apply()
            self._emit(deliver)
            if self._can_grow():
                self._grow()
                self._apply()  # a commit that came during the step: only what survives it is worth sending
                self._emit(deliver)
        except Exception as error:  # drafters are guarded one by one: this is our own fault, and must end here too
            log.error("the engine failed; its sessions go on without it", exc_info=error)
            for session_id in list(self._growths):
                self._fail(session_id, error)
            self._emit(deliver)

    def _can_grow(self) -> bool:
        return any(growth.growing for growth in self._growths.values())

    def _apply(self) -> None:
        while self._inbox:
            operation = self._inbox.popleft()
            if isinstance(operation, Open):
                self._open(operation)
            elif isinstance(operation, Commit):
                self._commit(operation)
            else:
                self._forget(operation.session_id)

    def _open(self, operation: Open) -> None:
        session_id = operation.session.session_id
        try:
            self._drafter.open(operation.session)
        except Exception as error:
            self._fail(session_id, error)
            return
        self._growths[session_id] = Growth(operation, self.priors.setdefault(_regime(operation), Calibration()))

    def _commit(self, operation: Commit) -> None:
        growth = self._growths.get(operation.session_id)
        if growth is None:
            self._fail(operation.session_id, NotFound("the session is not open here"))
            return
        tree = growth.tree
        if operation.committed_length != tree.committed_length:
            message = f"committed length {operation.committed_length}, here it is {tree.committed_length}"
            self._fail(operation.session_id, Stale(message))
            return
        self.foreseen += tree.foreseen(operation.token_ids)
        growth.commit(operation)
        try:
            self._drafter.commit(operation.session_id, operation.token_ids)
        except Exception as error:
            self._fail(operation.session_id, error)

    def _grow(self) -> None:
        batch = self._choose()
        if not batch:  # candidates entered, none of them may have children
            return
        leaves = [growth.leaf(node) for growth, node in batch]
        started = self._clock()
        for growth, _ in batch:
            if growth.queue_ns < 0:
                growth.queue_ns = max(0, started - growth.arrived_ns)
                self.waits.observe(growth.queue_ns / 1e9)
        try:
            answers: list[object] = check_answers(self._drafter.expand(leaves), len(leaves))
        except Exception as error:
            answers = self._expand_apart(leaves, error)
        spent = self._clock() - started
        self.steps += 1
        self.drafting_ns += spent
        for (growth, node), answer in zip(batch, answers, strict=True):
            growth.forward_ns += spent
            self._attach(growth, node, answer)

    def _choose(self) -> list[tuple[Growth, Node]]:
        """The best leaves of all sessions, in equal shares; those served go to the end of the line."""
        ready = [growth for growth in self._growths.values() if growth.growing][: self._batch_leaves]
        batch: list[tuple[Growth, Node]] = []
        share = self._batch_leaves // len(ready)
        for growth in ready:
            # Each leaf brings a few children that enter: more leaves than fill the tree are wasted work.
            most = 1 + max(growth.tree.room, 0) // min(growth.branching, _ENTERING)
            batch.extend((growth, node) for node in growth.tree.take(min(share, most)))
            self._growths[growth.session_id] = self._growths.pop(growth.session_id)
        return batch

    def _expand_apart(self, leaves: list[Leaf], error: Exception) -> list[object]:
        """The whole call failed: ask session by session, so that only the culprit's pays."""
        by_session: dict[str, list[int]] = {}
        for index, leaf in enumerate(leaves):
            by_session.setdefault(leaf.session_id, []).append(index)
        answers: list[object] = [error] * len(leaves)
        if len(by_session) == 1:
            return answers
        for indices in by_session.values():
            own: list[object]
            try:
                own = check_answers(self._drafter.expand([leaves[index] for index in indices]), len(indices))
            except Exception as failure:
                own = [failure] * len(indices)
            for index, answer in zip(indices, own, strict=True):
                answers[index] = answer
        return answers

    def _attach(self, growth: Growth, node: Node, answer: object) -> None:
        if self._growths.get(growth.session_id) is not growth:
            return
        if answer is None:
            growth.tree.put_back(node)
            growth.pauses += 1
            # Each pause works off at least one token of what the drafter has not seen yet.
            if growth.pauses > 2 * (growth.tree.max_position + growth.tree.max_nodes):
                self._fail(growth.session_id, BadAnswer("never ready"))
            return
        growth.pauses = 0
        if isinstance(answer, Exception):
            self._fail(growth.session_id, answer)
            return
        try:
            candidates = check_answer(answer)
        except BadAnswer as error:
            self._fail(growth.session_id, error)
            return
        self.leaves_expanded += 1
        growth.attach(node, candidates)

    def _emit(self, deliver: Callable[[list[Event]], None]) -> None:
        now = self._clock()
        for growth in self._growths.values():
            event = growth.event(now)
            if event is not None:
                self._events.append(event)
        if self._events:
            events, self._events = self._events, []
            deliver(events)

    # Ends of sessions.

    def _fail(self, session_id: str, error: Exception) -> None:
        if not isinstance(error, GraftreeError):
            kind = str(error) if isinstance(error, BadAnswer) else type(error).__name__
            self.faults[kind] += 1
            if self.faults[kind] == 1:
                log.warning("the drafter failed; its session goes on without it", kind=kind)
            error = GraftreeError(f"the drafter failed: {kind}")
        self._forget(session_id)
        self._events.append(Failed(session_id, error))

    def _forget(self, session_id: str) -> None:
        if self._growths.pop(session_id, None) is None:
            return
        try:
            self._drafter.close(session_id)
        except Exception as error:
            self.faults[f"close: {type(error).__name__}"] += 1


def _regime(opened: Open) -> str:
    if opened.drawing is not None:
        return opened.drawing.rule.name.lower()
    return "greedy" if opened.session.sampling.greedy else "noise"
