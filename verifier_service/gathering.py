"""`Gathering`: whether the next forward waits for sessions that earlier ones answered.

A forward over four sessions takes hardly longer than one over one, so sessions that take turns in different forwards
wait for each other: each of them gets a token in two forwards' time. Who was answered comes back after a turn of its
router, and a wait for drafts where that pays. To wait w for the next of them costs every session that is ready w;
not to wait costs every one that is late the rest of a whole forward. What costs fewer seconds, summed over the
sessions, is done; nobody waits longer than one forward takes.
"""

from __future__ import annotations

from collections.abc import Hashable

FIRST_GUESS_NS = 2_000_000  # of a turn, before any was seen
MEMORY = 0.2  # weight of the newest turn
LEAST_NS = 100_000  # a shorter wait is none
SURPRISE = 4.0  # a forward that took longer than so many usual ones counts as so many


class Gathering:
    """Learns how long sessions are away. Times are nanoseconds of one monotonic clock."""

    def __init__(self) -> None:
        self._away: dict[Hashable, int] = {}  # session -> when it was answered
        self._turns: dict[Hashable, float] = {}  # session -> how long it tends to be away
        self._turn: float = FIRST_GUESS_NS  # of any session
        self._forward = 0.0
        self._since: int | None = None  # when the wait that is on began

    def answered(self, session: Hashable, now: int) -> None:
        """A session has its verdict: it is away from now on."""
        self._away[session] = now

    def returned(self, session: Hashable, now: int) -> None:
        """Its next step is there."""
        if (since := self._away.pop(session, None)) is not None:
            turn = float(max(0, now - since))
            known = self._turns.get(session, turn)
            self._turns[session] = known + MEMORY * (turn - known)
            self._turn += MEMORY * (turn - self._turn)

    def gone(self, session: Hashable) -> None:
        """It does not come back."""
        self._away.pop(session, None)
        self._turns.pop(session, None)

    def began(self) -> None:
        """A forward begins: whatever wait there was is over."""
        self._since = None

    def ran(self, seconds_ns: int) -> None:
        """A forward without prompts took so long."""
        usual = self._forward
        if not SURPRISE * seconds_ns > usual > 0:  # the first, or those before it were no measure
            self._forward = seconds_ns
        else:
            self._forward += MEMORY * (min(seconds_ns, SURPRISE * usual) - usual)

    def wait(self, ready: int, now: int) -> int:
        """How long the next forward should still wait; 0 = not at all.

        Args:
            ready: sessions that could run.
        """
        if not ready or not self._away:
            return 0
        room = self._forward - (0 if self._since is None else now - self._since)
        # Who takes longer would be in time for the forward after the next.
        expected = sorted(
            remaining
            for session, since in self._away.items()
            if (remaining := self._remaining(session, since, now)) < room
        )
        cost, best, before, wait = 0.0, 0.0, 0.0, 0.0  # in session-nanoseconds, against not waiting
        for count, remaining in enumerate(expected):
            cost += (ready + count) * (remaining - before)  # those who are there wait for this one
            cost -= self._forward - remaining  # which then does not wait for the end of a forward without it
            before = remaining
            if cost < best:
                best, wait = cost, remaining
        if best == 0.0:
            return 0
        self._since = now if self._since is None else self._since
        return max(LEAST_NS, round(wait))

    def _remaining(self, session: Hashable, since: int, now: int) -> float:
        """Until it returns: what its usual turn leaves, and once that is over, as long again as it is late."""
        return abs(since + self._turns.get(session, self._turn) - now)
