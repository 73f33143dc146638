"""From a forward's logits to a verdict: accept, compact, commit."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from graftree.acceptance import ROOT, Acceptance, accept
from graftree.sampling import describe, process
from graftree.v1 import common_pb2, verification_pb2
from verifier_service.reservation import Cache
from verifier_service.session import Session, Share, Step


def conclude(
    share: Share, step: Step, logits: Any, kv: Cache, picks: Sequence[int] | None = None
) -> verification_pb2.Verdict:
    """Walk the step's tree, move the accepted rows into place, commit the tokens.

    Args:
        share: what was run; its root's row counts as cached.
        step: the share's.
        logits: (1 + nodes, V) the root's, then each node's.
        kv: where the rows are.
        picks: tokens that were chosen on the logits' device already (`verifier_service.picker`).

    Returns:
        The verdict without its timings.

    Raises:
        GraftreeError: as `graftree.acceptance.accept`; nothing was committed.
    """
    session, root_row = share.session, len(share.session.token_ids)
    rows: dict[int, NDArray[Any]] = {}

    def row(node: int) -> NDArray[Any]:
        if node not in rows:
            rows[node] = np.asarray(logits[node - ROOT].cpu())
        return rows[node]

    acceptance = accept(
        step.tree,
        row,
        session.params,
        session.context,
        rule=session.rule,
        proposals=step.proposals,
        picks=picks,
    )
    count = len(acceptance.nodes)
    log_probs = _log_probs(session, acceptance, row)
    kv.move_rows(session.blocks, [root_row + node for node in acceptance.nodes], range(root_row, root_row + count))
    session.cached += count
    session.commit(acceptance)
    return verification_pb2.Verdict(
        session_id=session.session_id,
        step=step.number,
        token_ids=acceptance.token_ids,
        accepted_nodes=[step.kept[node] for node in acceptance.nodes],
        tree_error=step.tree_error,
        log_probs=log_probs,
    )


def _log_probs(
    session: Session, acceptance: Acceptance, row: Callable[[int], NDArray[Any]]
) -> list[common_pb2.TokenLogProb]:
    """One per token of the run, which is not committed yet."""
    if not session.log_probs:
        return []
    found = []
    for depth, (node, token) in enumerate(zip(acceptance.visited, acceptance.token_ids, strict=True)):
        scores = row(node)
        if session.processed_log_probs:
            scores = process(scores, session.params, session.context, acceptance.token_ids[:depth])
        found.append(describe(scores, token, session.alternatives).to_proto())
    return found
