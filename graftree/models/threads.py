"""`use_threads`: how many CPU threads torch computes with in this process."""

from __future__ import annotations

import torch

from graftree.cores import threads_for


def use_threads(count: int) -> None:
    """Args: `count` as configured; 0 = all cores but one, or fewer where the environment has told torch so."""
    torch.set_num_threads(count or min(torch.get_num_threads(), threads_for()))
