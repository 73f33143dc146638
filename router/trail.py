"""`Trail`: one session's tokens on their way to its record in Redis."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence

import structlog

from graftree.errors import GraftreeError, LeaseLost
from graftree.store.committer import Committer, Durability
from graftree.store.sessions import Commit, SessionRecord
from router.figures import Figures
from router.metrics import Metrics

log = structlog.get_logger(__name__)


class Trail:
    """One session's.

    Args:
        record: as it was created or acquired; what it holds already is not written again.
        figures: of the session; the time it waits for Redis is added.
        clock_ns: monotonic nanoseconds.
    """

    def __init__(
        self,
        record: SessionRecord,
        committer: Committer,
        figures: Figures,
        metrics: Metrics,
        clock_ns: Callable[[], int],
    ) -> None:
        self._record, self._committer = record, committer
        self._figures, self._metrics, self._clock_ns = figures, metrics, clock_ns

    def commit(self, length: int, token_ids: Sequence[int], *, finished: bool) -> asyncio.Future[Durability] | None:
        """Start to write what Redis does not have yet; a resumed generation repeats what it has.

        Args:
            length: of the output before `token_ids`.
            finished: nothing will follow.
        """
        record = self._record
        known = max(0, len(record.token_ids) - length)
        if known >= len(token_ids) and (not finished or record.finished):
            return None
        commit = Commit(
            record.session_id,
            record.epoch,
            length + min(known, len(token_ids)),
            token_ids[known:],
            finished=finished,
            owner=record.owner,
        )
        writing = asyncio.ensure_future(self._committer.commit(commit))
        writing.add_done_callback(_retrieve)  # nobody awaits it where the session ends meanwhile
        return writing

    async def durable(self, commit: asyncio.Future[Durability] | None) -> None:
        """Wait until it is written.

        Raises:
            LeaseLost: another router has the session.
        """
        if commit is None:
            return
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
