"""`Scheduler`: which sessions share the next forward, and with how many rows."""

from __future__ import annotations

from verifier_service.session import Session, Share


class Scheduler:
    """Round robin over sessions, one forward at a time (iteration-level scheduling: Orca, OSDI'22).

    A step runs whole or waits; prefill is cut into chunks so that steps of other sessions ride along
    (chunked prefill: Sarathi-Serve, OSDI'24). Whoever was served goes to the back, so the one that waited longest is
    first, and the first one always gets rows.
    """

    def __init__(self, step_tokens: int) -> None:
        """Args: `step_tokens` is the most rows of one forward."""
        # Sessions that had something to run at the last `plan`, and of these those that got no row; others read them.
        self.waiting = self.left_out = 0
        self._step_tokens = step_tokens
        self._queue: dict[Session, None] = {}

    def add(self, session: Session) -> None:
        self._queue[session] = None

    def remove(self, session: Session) -> None:
        self._queue.pop(session, None)

    @property
    def has_work(self) -> bool:
        """Whether `plan` would give a share."""
        return any(session.has_work for session in self._queue)

    def plan(self) -> list[Share]:
        """The next forward's shares; empty when no session has anything to run."""
        waiting = [session for session in self._queue if session.has_work]
        self.waiting = len(waiting)
        shares: dict[Session, Share] = {}
        room = self._step_tokens
        for index, session in enumerate(waiting):
            # A prompt takes its fair part now, and below what the others left.
            budget = room if session.prefilled else min(room, max(1, room // (len(waiting) - index)))
            if share := session.share(budget):
                shares[session] = share
                room -= len(share)
        for session in waiting:
            if room and not session.prefilled:
                before = len(shares[session]) if session in shares else 0
                if share := session.share(before + room):
                    shares[session] = share
                    room -= len(share) - before
        self.left_out = len(waiting) - len(shares)
        for session in shares:
            self._queue[session] = self._queue.pop(session)
        return list(shares.values())
