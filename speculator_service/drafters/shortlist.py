"""From an SSM's logits to the few candidates worth ranking.

The request's processors that shape which tokens are likely (allowed and banned tokens, logit bias, temperature,
min-p, top-k, top-p; see `graftree.sampling`) are applied to the most likely ids only, where they agree with the full
computation as long as the ids they keep are among these. Penalties and phrases depend on what was said and go the
full way.
"""

from __future__ import annotations

import math

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from graftree.errors import GraftreeError, InvalidArgument
from graftree.sampling import BAN, SamplingContext, SamplingParams, process

SIZE = 128  # ids; the noise can lift one of them above the most likely, hardly one beyond

Shortlist = tuple[NDArray[np.int64], NDArray[np.float64]]

NOTHING: Shortlist = (np.empty(0, dtype=np.int64), np.empty(0))


def shortlists(logits: Tensor, params: SamplingParams, size: int, draft_ids: Tensor | None = None) -> list[Shortlist]:
    """Per row the most likely ids under the processed q, best first.

    Args:
        logits: (n, V) float32.
        params: the request's parameters, without penalties and phrases.
        size: most ids per row.
        draft_ids: (V,) the token of each entry of a row; None = they are the tokens. Not together with parameters
            that name tokens.

    Returns:
        n pairs of (K,) int64 ids and (K,) float64 natural log probabilities under the processed q.

    Raises:
        GraftreeError: the logits are not finite.
    """
    if params.changes_argmax:
        logits = logits.clone()
        if params.allowed_ids.size:
            forbidden = torch.ones(logits.shape[-1], dtype=torch.bool)
            forbidden[params.allowed_ids[params.allowed_ids < logits.shape[-1]]] = False
            logits[:, forbidden.to(logits.device)] = -math.inf
        logits[:, params.banned_ids[params.banned_ids < logits.shape[-1]]] = -math.inf
        for token, bias in params.logit_bias.items():
            if token < logits.shape[-1]:
                logits[:, token] = -math.inf if bias <= BAN else logits[:, token] + bias
    scaled = logits if params.greedy else logits / params.temperature
    values, ids = torch.topk(scaled, min(size, logits.shape[-1]), dim=-1)
    norms = torch.logsumexp(scaled, dim=-1)
    if not bool(torch.isfinite(norms).all()):
        raise GraftreeError("the SSM's logits are not finite")
    log_q = (values - norms[:, None]).double().cpu().numpy()
    if draft_ids is not None:
        ids = draft_ids[ids]
    return [_cut(row_ids, row, params) for row_ids, row in zip(ids.cpu().numpy(), log_q, strict=True)]


def penalised(
    logits: Tensor, params: SamplingParams, context: SamplingContext, path: tuple[int, ...], size: int = SIZE
) -> Shortlist:
    """As `shortlists`, for one row (V,) and with every processor; empty where they leave nothing to say."""
    try:
        log_q = process(logits.cpu().numpy(), params, context, path)
    except InvalidArgument:
        return NOTHING
    ids = np.argsort(-log_q, kind="stable")[:size]
    ids = ids[log_q[ids] > -math.inf]
    return ids, log_q[ids]


def _cut(ids: NDArray[np.int64], log_q: NDArray[np.float64], params: SamplingParams) -> Shortlist:
    """min-p, top-k and top-p over ids sorted by log_q; log_q is normalised over the whole vocabulary."""
    kept = int((log_q > -math.inf).sum())
    if params.greedy:
        return ids[:kept], log_q[:kept]
    whole = True  # the mass beyond the list still counts
    if params.min_p > 0:
        limit = log_q[0] + math.log(params.min_p)
        below = int((log_q[:kept] >= limit).sum())
        whole, kept = whole and below == log_q.size, below
    if 0 < params.top_k <= kept:
        whole, kept = False, params.top_k
    ids, log_q = ids[:kept], log_q[:kept]
    if not whole:
        log_q = log_q - math.log(np.exp(log_q).sum())
    if params.top_p < 1:
        before = np.cumsum(np.exp(log_q)) - np.exp(log_q)
        kept = max(1, int((before < params.top_p).sum()))
        if kept < log_q.size or not whole:
            ids, log_q = ids[:kept], log_q[:kept]
            log_q = log_q - math.log(np.exp(log_q).sum())
    return ids, log_q
