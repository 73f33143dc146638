"""`Journey`: one generation's way over routers: what to ask next, whom, and when."""

from __future__ import annotations

import uuid
from collections.abc import Callable
from random import Random

import grpc

from graftree.errors import (
    Cancelled,
    DeadlineExceeded,
    GraftreeError,
    InvalidArgument,
    LeaseLost,
    NotFound,
    ResourceExhausted,
    Unavailable,
)
from graftree.rpc.status import DETAILS_KEY, from_rpc
from graftree.sdk.answer import Answer
from graftree.sdk.reconnect import Reconnect
from graftree.v1.generation_pb2 import GenerateRequest, Recollection, TokenIds

# Of what gRPC itself says where a call never reached anybody.
_NEVER_SENT = ("failed to connect", "dns resolution failed", "name resolution failed")
# A transport that breaks shows as one of these, without the details that a service's own errors have.
_BROKEN = (
    grpc.StatusCode.UNAVAILABLE,
    grpc.StatusCode.INTERNAL,
    grpc.StatusCode.UNKNOWN,
    grpc.StatusCode.CANCELLED,
)
# Two streams that take one generation from each other must not do so for ever.
_MOST_LOST_LEASES = 2
_LOST_LEASE_SECONDS = 10.0  # those that are longer ago do not count


def failure(error: grpc.RpcError) -> tuple[GraftreeError, bool]:
    """What a call's error stands for, and whether the connection is to blame rather than the service."""
    details = error.trailing_metadata() or ()
    broken = error.code() in _BROKEN and not any(key == DETAILS_KEY for key, _ in details)
    return from_rpc(error), broken


class Journey:
    """Which request a generation sends next, to which router, and when.

    Args:
        request: what the caller wants; gets an id here if it has none.
        targets: how many routers there are.
        first: the one to begin with.
        policy: None = the first error is the caller's.
        rng: of ids and jitter.
        clock: seconds, monotonic.
        timeout: seconds for all of it; None = no limit.

    Attributes:
        request: to be sent.
        target: the router to send it to.
        failures: in a row, without a token in between.
        reconnects: calls beyond the first one.
    """

    def __init__(
        self,
        request: GenerateRequest,
        *,
        targets: int,
        first: int,
        policy: Reconnect | None,
        rng: Random,
        clock: Callable[[], float],
        timeout: float | None,
    ) -> None:
        self.request = request
        self.target = first % targets
        self.failures = self.reconnects = 0
        self._targets = targets
        self._policy, self._rng, self._clock = policy, rng, clock
        self._end = None if timeout is None else clock() + timeout
        self._lost_leases: list[float] = []
        self._heard = False
        if policy is not None and not request.request_id:
            request.request_id = str(uuid.UUID(int=rng.getrandbits(128), version=4))

    @property
    def remaining(self) -> float | None:
        """Seconds that are left; None = no limit."""
        return None if self._end is None else max(0.0, self._end - self._clock())

    @property
    def sampled(self) -> bool:
        """Whether the answer depends on the seed."""
        if not self.request.HasField("sampling"):
            return False
        sampling = self.request.sampling
        return not sampling.HasField("temperature") or sampling.temperature > 0

    def heard(self, *, progress: bool) -> None:
        """Something came of the call that was sent last; with `progress` it was new."""
        self._heard = True
        if progress:
            self.failures = 0

    def failed(self, error: GraftreeError, answer: Answer, *, broken: bool) -> float:
        """Decide how to go on after `error`.

        Args:
            answer: what has come so far.
            broken: the connection is to blame.

        Returns:
            Seconds to wait before `request` is sent to `target`.

        Raises:
            GraftreeError: `error`, where it is final, or DeadlineExceeded.
        """
        if self._policy is None or self._is_final(error, answer, broken):
            raise error
        self.failures += 1
        if self.failures > self._policy.attempts:
            raise error
        self.reconnects += 1
        unsent, self._heard = _never_sent(error) and not self._heard, False
        if _is_unknown(error, self.request):
            self._start_over(error, answer)  # here: this router lives, which is more than is known of others
            return 0.0
        self.target = (self.target + 1) % self._targets
        if not unsent:
            self._ask_for_rest(answer)
        pause = self._pause(error)
        if self._end is not None and self._clock() + pause >= self._end:
            raise DeadlineExceeded(f"the time ran out while reconnecting after: {error}") from error
        return pause

    def _is_final(self, error: GraftreeError, answer: Answer, broken: bool) -> bool:
        begun = answer.started is not None
        if isinstance(error, LeaseLost):
            now = self._clock()
            self._lost_leases = [each for each in self._lost_leases if each > now - _LOST_LEASE_SECONDS] + [now]
            return len(self._lost_leases) > _MOST_LOST_LEASES
        if _is_unknown(error, self.request):
            return False
        if isinstance(error, ResourceExhausted):
            return not begun
        if isinstance(error, DeadlineExceeded) or not (broken or isinstance(error, Unavailable | Cancelled)):
            return True
        # A caller with one router that is not there, or says no, learns it at once.
        return not begun and self._targets == 1 and (not broken or _never_sent(error))

    def _start_over(self, error: GraftreeError, answer: Answer) -> None:
        """Ask for everything: again under the same seed if nobody knows it, and compare with what is here."""
        del self.request.resume_after[:]
        self.request.ClearField("recollection")
        answer.repeat()
        if isinstance(error, NotFound) and answer.started is not None and self.sampled:
            self.request.sampling.seed = answer.started.seed

    def _ask_for_rest(self, answer: Answer) -> None:
        counts, recollection = answer.token_counts, self.request.recollection
        if answer.started is not None:
            answer.remember(recollection)
        elif not self.sampled or self.request.sampling.HasField("seed"):
            # It may or may not have been begun; the tokens are the same.
            counts = [0] * max(1, self.request.n)
            recollection.CopyFrom(_nothing(self.request))
        else:
            # While Redis is away nobody can tell, but one can begin: every router is asked for both.
            resumes = (self.failures - 1) // self._targets % 2 == 0
            counts = [0] * max(1, self.request.n) if resumes else []
        self.request.resume_after[:] = counts
        answer.resume(counts)

    def _pause(self, error: GraftreeError) -> float:
        assert self._policy is not None, "checked by the caller"
        rounds = (self.failures - 1) // self._targets
        pause = min(self._policy.longest_pause, self._policy.first_pause * 2.0 ** min(rounds, 32))
        if isinstance(error, ResourceExhausted):
            pause = min(self._policy.longest_pause, max(pause, error.retry_after_s))
        return pause * self._rng.uniform(0.5, 1.0)


def _nothing(request: GenerateRequest) -> Recollection:
    return Recollection(seed=request.sampling.seed, samples=[TokenIds() for _ in range(max(1, request.n))])


def _is_unknown(error: GraftreeError, request: GenerateRequest) -> bool:
    """Whether the record that was to be resumed is gone, or holds less than the client has."""
    if not request.resume_after:
        return False
    return isinstance(error, NotFound) or (
        isinstance(error, InvalidArgument) and error.field.startswith("resume_after[")
    )


def _never_sent(error: GraftreeError) -> bool:
    return any(words in str(error).lower() for words in _NEVER_SENT)
