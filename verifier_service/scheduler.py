"""`Scheduler`: which sessions share the next forward, and with how many rows."""

from __future__ import annotations

from collections.abc import Sequence

from verifier_service.session import Session, Share

STARVING = 64  # forwards that a session with work was left out of; then it is as urgent as any
PROMPTS_SHARE = 8  # an eighth of a forward's rows is kept for prompts, where there are some


class Scheduler:
    """Rows of one forward at a time (iteration-level scheduling: Orca, OSDI'22), by priority, equals in turns.

    A step runs whole or waits; prefill is cut into chunks so that steps of other sessions ride along
    (chunked prefill: Sarathi-Serve, OSDI'24). Steps come before prompts, which share what is left, an eighth at
    least: a long prompt makes a forward as long as `step_tokens` rows, but does not keep steps out of it. Whoever was
    served goes to the back, so the one that waited longest is first, and the first one always gets rows. Sessions of
    lower priority get what those of higher leave, and for once all they want after `STARVING` forwards without a row.
    """

    def __init__(self, step_tokens: int) -> None:
        """Args: `step_tokens` is the most rows of one forward."""
        # Sessions that had something to run at the last `plan`, and of these those that got no row; others read them.
        self.waiting = self.left_out = 0
        self._step_tokens = step_tokens
        self._queue: dict[Session, int] = {}  # forwards in a row that each was left out of

    def add(self, session: Session) -> None:
        self._queue[session] = 0

    def remove(self, session: Session) -> None:
        self._queue.pop(session, None)

    @property
    def ready(self) -> int:
        """Sessions that have something to run."""
        return sum(session.has_work for session in self._queue)

    def plan(self) -> list[Share]:
        """The next forward's shares; empty when no session has anything to run."""
        waiting = [session for session in self._queue if session.has_work]
        urgent = [session for session in waiting if self._queue[session] >= STARVING]
        shares: dict[Session, Share] = {}
        self._serve(urgent, shares)
        for priority in sorted({session.priority for session in waiting}, reverse=True):
            own = [session for session in waiting if session.priority == priority and session not in shares]
            self._serve(own, shares)
        self.waiting, self.left_out = len(waiting), len(waiting) - len(shares)
        for session in waiting:
            self._queue[session] += 1
        for session in sorted(shares, key=lambda session: len(shares[session])):  # who got least is first again
            del self._queue[session]
            self._queue[session] = 0
        return list(shares.values())

    def _serve(self, waiting: Sequence[Session], shares: dict[Session, Share]) -> None:
        """Give equals, those that waited longest first, what is left of the forward's rows."""
        room = self._step_tokens - sum(map(len, shares.values()))
        steps = [session for session in waiting if session.prefilled]
        prompts = [session for session in waiting if not session.prefilled]
        kept = -(-room // PROMPTS_SHARE) if prompts else 0
        for session in steps:
            budget = room if session is waiting[0] else room - kept
            if share := session.share(budget):
                shares[session] = share
                room -= len(share)
        for index, session in enumerate(prompts):
            # A fair part now, and below what the others left.
            if share := session.share(-(-room // (len(prompts) - index))):
                shares[session] = share
                room -= len(share)
        for session in prompts:
            if room:
                before = len(shares[session]) if session in shares else 0
                if share := session.share(before + room):
                    shares[session] = share
                    room -= len(share) - before
