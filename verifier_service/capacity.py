"""How many tokens of KV cache a verifier takes when nobody says, and what else of a GPU's memory is planned.

On a CPU the cache is a share of what is free. On a GPU nobody shares: of what the weights have left free

    a margin        GPU_MARGIN of the whole: the driver's own, libraries' work space, what lies in pieces
    one step        activations and logits of `step_tokens` rows, and what sampling works on (`step_bytes`)
    recorded steps  GRAPH_SHARE of the whole, where steps are recorded (`graph_bytes`)

are set aside and the rest is cache, so that no step runs out of memory.
"""

from __future__ import annotations

import os
from pathlib import Path

import torch
from transformers import PreTrainedModel

from graftree.device_sampling import SCRATCH_BYTES

CPU_SHARE = 0.25  # several pods may share a machine, and the page cache holds weights
CPU_LIMIT_BYTES = 8 << 30
GPU_MARGIN = 0.03
GRAPH_SHARE = 1 / 32

_CGROUP = Path("/sys/fs/cgroup")


def kv_tokens(
    *,
    bytes_per_token: int,
    device: torch.device,
    max_sessions: int,
    max_context: int,
    step_bytes: int = 0,
    graph_bytes: int = 0,
) -> int:
    """What `max_sessions` of full length need, bounded by the memory that is there.

    Args:
        bytes_per_token: keys and values of one token over all layers.
        device: where the cache will be.
        max_sessions: sessions open at once.
        max_context: tokens of the longest.
        step_bytes, graph_bytes: set aside on a GPU.
    """
    if device.type == "cuda":
        free, total = torch.cuda.mem_get_info(device)
        room = gpu_room(free=free, total=total, step_bytes=step_bytes, graph_bytes=graph_bytes)
    else:
        room = min(int(free_memory() * CPU_SHARE), CPU_LIMIT_BYTES)
    return min(max_sessions * max_context, room // bytes_per_token)


def gpu_room(*, free: int, total: int, step_bytes: int, graph_bytes: int) -> int:
    """Bytes for the cache of a GPU that holds the weights already; 0 = there is no room."""
    return max(0, free - int(total * GPU_MARGIN) - step_bytes - graph_bytes)


def graph_bytes(cuda_graphs: str, device: torch.device) -> int:
    """What recorded steps may take; 0 = none are recorded.

    Args:
        cuda_graphs: auto = on a GPU, on, off.
        device: of the model.
    """
    if cuda_graphs == "off" or (cuda_graphs == "auto" and device.type != "cuda"):
        return 0
    return int(torch.cuda.mem_get_info(device)[1] * GRAPH_SHARE) if device.type == "cuda" else 1


def step_bytes(model: PreTrainedModel, rows: int) -> int:
    """What the largest step takes beside weights and cache.

    Of each row one layer's states at a time, some of them twice, and logits: as the model gives them, in float32, and
    once more in the order that they are sampled in.
    """
    config, size = model.config, int(model.dtype.itemsize)
    hidden, inner = int(config.hidden_size), int(getattr(config, "intermediate_size", 0) or 4 * config.hidden_size)
    states = 6 * hidden + 3 * max(hidden, bytes_per_token(model) // (2 * config.num_hidden_layers * size)) + 3 * inner
    return rows * (states * size + int(config.vocab_size) * (size + 8)) + SCRATCH_BYTES


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
