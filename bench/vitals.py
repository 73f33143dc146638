"""What processes hold: memory and file descriptors by the system's word, metrics by their own; and how it changes."""

from __future__ import annotations

import os
import socket
import urllib.request
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from graftree.local.pod import LocalPod
from graftree.local.processes import ProcessPod

MB = 1e6


def pid_of(pod: LocalPod) -> int:
    """The process that a pod runs in: its own, or this one."""
    return pod.pid if isinstance(pod, ProcessPod) else os.getpid()


def resident(pid: int) -> float:
    """Megabytes of memory that a process holds; 0 = it is gone."""
    try:
        pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
    except (OSError, IndexError):
        return 0.0
    return pages * os.sysconf("SC_PAGE_SIZE") / MB


def descriptors(pid: int) -> int:
    """Files and sockets that a process has open; 0 = it is gone."""
    try:
        return len(os.listdir(f"/proc/{pid}/fd"))
    except OSError:
        return 0


def spent(pid: int) -> float:
    """Seconds of processor time that a process has had; 0 = it is gone."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return 0.0
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def free_port() -> int:
    """A port of this machine that nobody listens on."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def scrape(address: str) -> dict[str, float]:
    """A pod's metrics, HOST:PORT of its `metrics_listen`; labels are part of the names."""
    with urllib.request.urlopen(f"http://{address}/metrics", timeout=10) as answer:
        lines = answer.read().decode().splitlines()
    pairs = (line.rsplit(" ", 1) for line in lines if line and not line.startswith("#"))
    return {name: float(value) for name, value in pairs}


def slope(times: Sequence[float], values: Sequence[float]) -> float:
    """Least-squares slope, in units of the values per minute for times in seconds; 0 for fewer than three."""
    if len(times) < 3:
        return 0.0
    x, y = np.asarray(times, float), np.asarray(values, float)
    x = x - x.mean()
    return float(60.0 * (x @ (y - y.mean())) / (x @ x))
