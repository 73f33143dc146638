"""`Allowance`: what one API key may still do. Token buckets: so much a second on average, so much at once."""

from __future__ import annotations

from collections.abc import Callable

from graftree.errors import ResourceExhausted
from graftree.security.keys import ApiKey

TOKEN_SECONDS = 60.0  # a minute's worth of tokens may be used at once


class Bucket:
    """Fills with `rate` a second up to `size`. What is known only later is taken all the same, to below nothing.

    Args:
        clock: seconds, monotonic.
    """

    def __init__(self, rate: float, size: float, clock: Callable[[], float]) -> None:
        self._rate, self._size, self._clock = rate, size, clock
        self._level, self._at = size, clock()

    def take(self, amount: float) -> None:
        """Take that much out, whether or not it is there."""
        self._level = self._now() - amount

    def wait(self, amount: float) -> float:
        """Seconds until that much will be there; 0 = it is."""
        return max(0.0, (amount - self._now()) / self._rate)

    def _now(self) -> float:
        now = self._clock()
        self._level, self._at = min(self._size, self._level + (now - self._at) * self._rate), now
        return self._level


class Allowance:
    """Of one key on one router.

    Attributes:
        active: its requests under way.
    """

    def __init__(self, key: ApiKey, clock: Callable[[], float]) -> None:
        self.active = 0
        self._clock = clock
        self._begin(key)

    def follow(self, key: ApiKey) -> None:
        """The key's entry as it is now: other limits begin anew, what is under way stays."""
        if key != self.key:
            self._begin(key)

    def _begin(self, key: ApiKey) -> None:
        self.key = key
        rate, per_second = key.requests_per_second, key.tokens_per_minute / 60.0
        self._requests = Bucket(rate, key.burst or max(1.0, rate), self._clock) if rate else None
        self._tokens = Bucket(per_second, per_second * TOKEN_SECONDS, self._clock) if per_second else None

    def enter(self) -> None:
        """A request begins.

        Raises:
            ResourceExhausted: which limit is reached, and when trying again makes sense.
        """
        name = self.key.name
        if self.key.concurrent and self.active >= self.key.concurrent:
            raise ResourceExhausted(f"key {name} has {self.active} requests under way, the most it may", 1.0)
        if self._tokens is not None and (seconds := self._tokens.wait(1.0)):
            limit = f"{self.key.tokens_per_minute:g} tokens a minute"
            raise ResourceExhausted(f"key {name} has used its {limit}", seconds)
        if self._requests is not None:
            if seconds := self._requests.wait(1.0):
                limit = f"{self.key.requests_per_second:g} requests a second"
                raise ResourceExhausted(f"key {name} has used its {limit}", seconds)
            self._requests.take(1.0)
        self.active += 1

    def leave(self) -> None:
        """It is over."""
        self.active -= 1

    def charge(self, tokens: int) -> None:
        """Tokens of a prompt, or that were delivered."""
        if self._tokens is not None:
            self._tokens.take(tokens)
