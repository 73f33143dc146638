"""`Trail`: one session's tokens on their way to its record in Redis."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence

import structlog

from graftree.errors import GraftreeError, LeaseLost
from graftree.store.committer import Committer, Durability
from graftree.store.sessions import Commit, SessionRecord
from graftree.v1.common_pb2 import TokenLogProb
from router import log_probs as stored
from router.figures import Figures
from router.metrics import Metrics

log = structlog.get_logger(__name__)


class Trail:
    """One session's.

    Args:
        record: as it was created or acquired.
        figures: of the session; the time it waits for Redis is added.
        clock_ns: monotonic nanoseconds.
        alternatives: log probabilities of other tokens that the request asked for.
    """

    def __init__(
        self,
        record: SessionRecord,
        committer: Committer,
        figures: Figures,
        metrics: Metrics,
        clock_ns: Callable[[], int],
        *,
        alternatives: int = 0,
    ) -> None:
        self._record, self._committer, self._alternatives = record, committer, alternatives
        self._figures, self._metrics, self._clock_ns = figures, metrics, clock_ns

    def commit(
        self, length: int, token_ids: Sequence[int], log_probs: Sequence[TokenLogProb] = (), *, finished: bool
    ) -> asyncio.Future[Durability]:
        """Start to write what has come.

        Args:
            length: of the output before `token_ids`.
            log_probs: of the tokens, where the request wants them.
            finished: nothing will follow.
        """
        record = self._record
        commit = Commit(
            record.session_id,
            record.epoch,
            length,
            token_ids,
            finished=finished,
            owner=record.owner,
            log_probs=stored.pack(log_probs, self._alternatives),
        )
        writing = asyncio.ensure_future(self._committer.commit(commit))
        writing.add_done_callback(_retrieve)  # nobody awaits it where the session ends meanwhile
        return writing

    async def durable(self, commit: asyncio.Future[Durability]) -> None:
        """Wait until it is written.

        Raises:
            LeaseLost: another router has the session.
        """
        begun = self._clock_ns()
        try:
            await commit
        except LeaseLost:
            raise
        except GraftreeError as error:
            # Redis lost or changed the record; the answer is right all the same, only its durability suffers.
            self._metrics.commit_failures += 1
            log.warning("commit failed", session=self._record.session_id, reason=str(error))
        finally:
            waited = self._clock_ns() - begun
            self._figures.commit_ns += waited
            self._metrics.commit_seconds.observe(waited / 1e9)


def _retrieve(task: asyncio.Future[Durability]) -> None:
    if not task.cancelled():
        task.exception()
