"""`Priors`: what the sessions of one router have learnt from one another."""

from __future__ import annotations

from graftree.calibration import Calibration
from router.patience import Race
from router.record import Agreement, Record


class Priors:
    """Shared by all sessions: each begins with it and teaches it.

    Attributes:
        agreement: of speculators that name the same token.
        races: how soon the first drafts come after a commit, and what they are worth.
    """

    def __init__(self) -> None:
        self.agreement = Agreement()
        self.races: dict[str, Race] = {}
        self._calibrations: dict[str, Calibration] = {}

    def record(self, kind: str) -> Record:
        """A new session's record of a kind of speculator."""
        return Record(kind, self._calibrations.setdefault(kind, Calibration()))
