"""How many tokens of KV cache a verifier takes when nobody says."""

from __future__ import annotations

import os
from pathlib import Path

import torch
from transformers import PreTrainedModel

CPU_SHARE = 0.25  # several pods may share a machine, and the page cache holds weights
GPU_SHARE = 0.9  # the weights are loaded; activations of a step fit in the rest
CPU_LIMIT_BYTES = 8 << 30

_CGROUP = Path("/sys/fs/cgroup")


def kv_tokens(*, bytes_per_token: int, device: torch.device, max_sessions: int, max_context: int) -> int:
    """What `max_sessions` of full length need, bounded by a share of the memory that is free.

    Args:
        bytes_per_token: keys and values of one token over all layers.
        device: where the cache will be.
        max_sessions: sessions open at once.
        max_context: tokens of the longest.
    """
    if device.type == "cuda":
        room = int(torch.cuda.mem_get_info(device)[0] * GPU_SHARE)
    else:
        room = min(int(free_memory() * CPU_SHARE), CPU_LIMIT_BYTES)
    return min(max_sessions * max_context, room // bytes_per_token)


def bytes_per_token(model: PreTrainedModel) -> int:
    """Bytes that one token's keys and values take over all layers."""
    config = model.config
    heads = config.num_attention_heads
    kv_heads = getattr(config, "num_key_value_heads", None) or heads
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // heads
    return 2 * int(config.num_hidden_layers * kv_heads * head_dim * model.dtype.itemsize)


def free_memory() -> int:
    """Bytes that this process can still take: the machine's, or what its control group leaves."""
    free = os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    meminfo = Path("/proc/meminfo")
    if meminfo.exists():
        for line in meminfo.read_text().splitlines():
            if line.startswith("MemAvailable:"):
                free = int(line.split()[1]) * 1024
    limit, used = _number(_CGROUP / "memory.max"), _number(_CGROUP / "memory.current")
    if limit is not None and used is not None:
        free = min(free, max(limit - used, 0))
    return free


def _number(path: Path) -> int | None:
    """Content of a control group's file; None where there is no such file or no limit."""
    try:
        return int(path.read_text())
    except (OSError, ValueError):
        return None
