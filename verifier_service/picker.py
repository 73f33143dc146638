"""`Picker`: tokens at all nodes of a step's trees, chosen where the logits are.

On a GPU a forward has only begun when it returns. What follows on the host may wait for the device once: here.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch

from graftree.acceptance import Rule
from graftree.models.spec import ModelSpec
from verifier_service.session import Share

if TYPE_CHECKING:
    from graftree.device_sampling import DeviceSampler

Picks = Sequence[int] | None  # one at the root and at each node; None = the host chooses along its walk


class Picker:
    """The engine's.

    Args:
        spec: the model's.
        everywhere: choose with torch on a CPU too. There the host's way is faster: it looks at the nodes of the walk
            alone.
    """

    def __init__(self, spec: ModelSpec, *, everywhere: bool = False) -> None:
        self._spec, self._everywhere = spec, everywhere
        self._sampler: DeviceSampler | None = None

    def pick(self, shares: Sequence[Share], outputs: Sequence[Any]) -> list[Picks]:
        """Choose for the shares that a step ends in, as far as their options allow; the device is idle afterwards.

        Args:
            outputs: of each share, (1 + nodes, V) logits or none.
        """
        picks: list[Picks] = [None] * len(shares)
        device = getattr(outputs[0], "device", torch.device("cpu"))
        if device.type == "cpu" and not self._everywhere:
            return picks
        chosen = [index for index, share in enumerate(shares) if _can_choose(share)]
        if chosen:
            from graftree.device_sampling import Choice, DeviceSampler

            if self._sampler is None:
                self._sampler = DeviceSampler(self._spec.vocab_size, self._spec.token_count, device)
            choices = []
            for index in chosen:
                session, step = shares[index].session, shares[index].step
                assert step is not None, "it was chosen for that"
                choices.append(Choice(session.params, session.context, step.tree))
            found = self._sampler.pick([outputs[index] for index in chosen], choices)
            for index, tokens in zip(chosen, found, strict=True):
                picks[index] = tokens.tolist()
        elif device.type == "cuda":
            torch.cuda.current_stream(device).synchronize()  # what a step took is measured behind this
        return picks


def _can_choose(share: Share) -> bool:
    return share.step is not None and (share.session.rule is Rule.TARGET_ONLY or share.session.params.greedy)
