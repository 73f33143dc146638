"""What a router knows of pods and sessions goes with them: nothing is kept under the names of those that are gone."""

from __future__ import annotations

from structlog.testing import capture_logs

from graftree.errors import GraftreeError
from graftree.store.registry import PodRecord
from graftree.v1.common_pb2 import SessionFailure, StreamHello
from graftree.v1.speculation_pb2 import DraftOpen, SpeculateResponse, TreeDelta
from router.links import SpeculatorLink
from router.metrics import Metrics
from tests.fakes import FakeSpeculator, FakeVerifier
from tests.router_harness import harness, until


class Member:
    """A session's place on a link."""

    error: GraftreeError | None = None

    def failed(self, error: GraftreeError) -> None:
        self.error = error

    def drafted(self, delta: TreeDelta) -> None:
        raise AssertionError("nobody drafts")


def test_a_session_that_failed_does_not_move_any_more() -> None:
    """A pod gives a session up that was on its way to another pod: one of the same name counts as staying again."""
    link = SpeculatorLink(PodRecord("s0", "speculator", "chain", "h:1"), StreamHello(), 1.0, Metrics())
    first, second = Member(), Member()
    link.join(first, DraftOpen(session_id="a"))
    link.moves("a", away=True)
    assert link.staying == 0
    link._dispatch(SpeculateResponse(failures=[SessionFailure(session_id="a", code=5)]))
    assert first.error is not None
    link.join(second, DraftOpen(session_id="a"))
    assert link.staying == 1


async def test_a_pod_that_was_gone_is_another_one() -> None:
    """Why a pod is refused is said once while it is there, and once more when it comes again after it was gone."""
    with capture_logs() as lines:
        async with harness(FakeVerifier()) as stack:
            for told in (1, 2):
                pod = FakeSpeculator("old")
                pod.hello.revision = 7
                await stack.add(pod)
                assert [line["event"] for line in lines].count("pod refused") == told
                await stack.remove(pod)
                await until(lambda: "old" not in stack.states())
