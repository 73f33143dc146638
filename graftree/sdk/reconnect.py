"""`Reconnect`: how hard a client tries to keep a generation going."""

from __future__ import annotations

from dataclasses import dataclass

from graftree.errors import InvalidArgument


@dataclass(frozen=True, slots=True)
class Reconnect:
    """What a client does when it loses its router: it asks another, or the same one again, to go on.

    The application sees one stream. Where no record of the generation is left, it is generated again under its seed
    and compared with what came before. Pauses between tries are jittered; the caller's timeout bounds everything.

    Attributes:
        attempts: failures in a row, without a token in between, before the error reaches the caller.
        first_pause: seconds before the second try at the same router, before jitter (half of it to all of it).
        longest_pause: pauses double up to this.
    """

    attempts: int = 16
    first_pause: float = 0.05
    longest_pause: float = 1.0

    def __post_init__(self) -> None:
        if self.attempts < 1:
            raise InvalidArgument("reconnect.attempts", self.attempts, "at least 1")
        if not 0 < self.first_pause <= self.longest_pause:
            limit = f"above 0, at most longest_pause, {self.longest_pause}"
            raise InvalidArgument("reconnect.first_pause", self.first_pause, limit)
