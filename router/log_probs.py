"""Log probabilities as a session's record holds them: as many bytes for each token, so that Redis can append them.

Little endian: log probability (float32) and rank (uint32) of the token, then for each of the alternatives that the
request asked for its id (int32, -1 = there is none) and its log probability (float32).
"""

from __future__ import annotations

import struct
from collections.abc import Sequence

from graftree.v1.common_pb2 import TokenLogProb

_NONE = (-1, 0.0)


def pack(log_probs: Sequence[TokenLogProb], alternatives: int) -> bytes:
    """Of some tokens; `alternatives` is what the request asked for."""
    layout = _layout(alternatives)
    return b"".join(layout.pack(each.log_prob, each.rank, *_others(each, alternatives)) for each in log_probs)


def unpack(data: bytes, token_ids: Sequence[int], alternatives: int) -> list[TokenLogProb]:
    """What `pack` was given, of these tokens; of the first ones where `data` is shorter."""
    found = []
    layout = _layout(alternatives)
    whole = len(data) // layout.size * layout.size
    for token, (log_prob, rank, *others) in zip(token_ids, layout.iter_unpack(data[:whole]), strict=False):
        each = TokenLogProb(token_id=token, log_prob=log_prob, rank=rank)
        for other, its_log_prob in zip(others[::2], others[1::2], strict=True):
            if other >= 0:
                each.alternatives.add(token_id=other, log_prob=its_log_prob)
        found.append(each)
    return found


def _layout(alternatives: int) -> struct.Struct:
    return struct.Struct("<fI" + "if" * alternatives)


def _others(log_prob: TokenLogProb, count: int) -> list[float | int]:
    pairs = [(each.token_id, each.log_prob) for each in log_prob.alternatives[:count]]
    pairs += [_NONE] * (count - len(pairs))
    return [part for pair in pairs for part in pair]
