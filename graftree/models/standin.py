"""The stand-in model: a deterministic toy that costs nothing, for measuring everything around a model.

A stand-in verifier answers with `next_token`; a stand-in drafter guesses with the same function and is right as
often as it is told to be. No weights, no torch.
"""

from __future__ import annotations

from graftree.noise import mix64

_POSITION_GAMMA = 0x9E3779B97F4A7C15
_HIT_SALT = 0xA0761D6478BD642F
_MASK = (1 << 64) - 1


def next_token(token: int, position: int, vocab_size: int) -> int:
    """What the stand-in model says after `token`.

    Args:
        token: the token before, its id.
        position: absolute position of the token being chosen (0 = first prompt token).
        vocab_size: ids are below this.

    Returns:
        A token id in [0, vocab_size), as good as uniform over (token, position).
    """
    return _hash(token, position) % vocab_size


def guess(token: int, position: int, vocab_size: int, hit_rate: float) -> int:
    """`next_token` for a share `hit_rate` of all (token, position), the id after it for the others."""
    right = next_token(token, position, vocab_size)
    lot = (_hash(token, position) ^ _HIT_SALT) * _POSITION_GAMMA & _MASK
    return right if (mix64(lot) >> 11) * 2.0**-53 < hit_rate else (right + 1) % vocab_size


def _hash(token: int, position: int) -> int:
    return mix64((mix64(token + 1) + (position + 1) * _POSITION_GAMMA) & _MASK)
