"""`VerifierSeat`: one session's place on one verifier, from open to close."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from graftree.codec import tree_to_proto
from graftree.errors import GraftreeError, InvalidArgument, Unavailable
from graftree.tree import TokenTree
from graftree.v1.verification_pb2 import Verdict, VerifyOpen, VerifyStep
from router.links import VerifierLink
from router.request import GenerationPlan

LONGEST_STEP_NS = 3600 * 10**9  # nothing that a verdict tells the time of takes so long
MOST_SESSIONS = 1 << 16  # of a step, where the verifier does not say how many it takes


class VerifierSeat:
    """Sends steps and waits for their verdicts, one at a time.

    Args:
        wire_id: the session's id on this link; another opening of the session has another.
        token_ids: prompt and output so far.
        prefix_of: wire id of a session on the same link to take KV rows from; empty = none.
    """

    def __init__(
        self,
        link: VerifierLink,
        plan: GenerationPlan,
        token_ids: Sequence[int],
        *,
        wire_id: str,
        epoch: int,
        salt: int,
        vocab_size: int,
        prefix_of: str = "",
    ) -> None:
        self.link = link
        self.error: GraftreeError | None = None
        self.wire_id = wire_id
        self._plan = plan
        self._vocab_size = vocab_size
        self._step = 0
        self._tree = TokenTree(0)
        self._answer: asyncio.Future[Verdict] | None = None
        link.join(
            self,
            VerifyOpen(
                session_id=wire_id,
                epoch=epoch,
                salt=salt,
                token_ids=token_ids,
                prompt_tokens=len(plan.prompt_token_ids),
                sampling=plan.sampling.to_proto(),
                mode=plan.rule.to_proto(),
                max_length=plan.max_length,
                max_nodes=plan.max_nodes,
                stop_token_ids=sorted(plan.stops.stop_token_ids),
                min_new_tokens=plan.stops.min_new_tokens,
                log_probs=plan.log_probs,
                alternatives=plan.alternatives,
                structured_output=plan.structured_output,
                log_probs_mode=plan.log_probs_mode,
                prefix_of=prefix_of,
                traceparent=plan.traceparent,
                tenant=plan.tenant,
                priority=plan.priority,
            ),
        )

    @property
    def open_to_others(self) -> bool:
        """Whether another session can join this one on its verifier."""
        return self.error is None and self.link.connected and not self.link.draining and not self.link.full

    def step(
        self, tree: TokenTree, committed_length: int, proposals: Sequence[VerifyStep.NodeProposals] = ()
    ) -> None:
        """Send the next verify step."""
        self._step += 1
        self._tree = tree
        self._answer = asyncio.get_running_loop().create_future()
        if self.error is not None:
            self._answer.set_exception(self.error)
            return
        self.link.step(
            VerifyStep(
                session_id=self.wire_id,
                step=self._step,
                committed_length=committed_length,
                tree=tree_to_proto(tree, log_probs=False) if len(tree) else None,
                proposals=proposals,
            )
        )

    async def verdict(self, timeout: float) -> Verdict:
        """The answer to the step sent last.

        Raises:
            Unavailable: none within `timeout` seconds, or the verifier is gone.
            GraftreeError: the verifier gave the session up.
        """
        assert self._answer is not None, "step() comes first"
        try:
            async with asyncio.timeout(timeout):
                return await self._answer
        except TimeoutError:
            self.link.rest(timeout)
            raise Unavailable(f"{self.link.record.pod_id}: no verdict within {timeout} s") from None

    def close(self) -> None:
        self.link.leave(self.wire_id)

    # What the link calls.

    def failed(self, error: GraftreeError) -> None:
        self.error = error
        if self._answer is not None and not self._answer.done():
            self._answer.set_exception(error)

    def answered(self, verdict: Verdict) -> None:
        if self._answer is None or self._answer.done() or verdict.step != self._step:
            self.link.metrics.late_verdicts += 1
            return
        self._check_figures(verdict)
        if not verdict.stale:
            self._check(verdict)
        self._answer.set_result(verdict)

    def _check_figures(self, verdict: Verdict) -> None:
        """Raises InvalidArgument for what no step can have: what is learnt and summed from it would stay wrong."""
        for name in ("queue_ns", "forward_ns", "sample_ns", "total_ns"):
            if (took := getattr(verdict.timings, name)) > LONGEST_STEP_NS:
                raise InvalidArgument(f"verdict.timings.{name}", took, f"at most {LONGEST_STEP_NS}")
        most = self.link.load.max_sessions or self.link.record.max_sessions or MOST_SESSIONS
        if verdict.batch_sessions > most:
            raise InvalidArgument("verdict.batch_sessions", verdict.batch_sessions, f"at most {most}")

    def _check(self, verdict: Verdict) -> None:
        """Raises InvalidArgument where the verdict does not follow from the tree it answers."""
        tokens, accepted = verdict.token_ids, verdict.accepted_nodes
        if len(tokens) != len(accepted) + 1:
            raise InvalidArgument("verdict.token_ids", len(tokens), f"one more than accepted_nodes, {len(accepted)}")
        if max(tokens) >= self._vocab_size:
            raise InvalidArgument("verdict.token_ids", max(tokens), f"below {self._vocab_size}")
        if self._plan.log_probs and len(verdict.log_probs) != len(tokens):
            raise InvalidArgument("verdict.log_probs", len(verdict.log_probs), f"one per token, {len(tokens)}")
        parent = -1
        for index, (node, token) in enumerate(zip(accepted, tokens, strict=False)):
            tree = self._tree
            if node >= len(tree) or tree.parents[node] != parent or tree.token_ids[node] != token:
                raise InvalidArgument(f"verdict.accepted_nodes[{index}]", node, "a path of the tree that was sent")
            parent = node
