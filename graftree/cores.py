"""How many CPU threads a pod computes with when nobody says."""

from __future__ import annotations

import os
from pathlib import Path

CGROUP = Path("/sys/fs/cgroup")


def usable_cores(cgroup: Path = CGROUP) -> int:
    """Cores that this process may use, at least 1.

    What the scheduler lets it run on, or fewer where its control group has a quota, as a container's CPU limit sets:
    torch looks at the machine only, and threads beyond the quota stand still while the others wait for them.
    """
    try:
        cores = len(os.sched_getaffinity(0))
    except AttributeError:  # not on Linux
        cores = os.cpu_count() or 1
    return max(1, min(cores, _quota(cgroup, cores)))


def threads_for(pods: int = 1, cgroup: Path = CGROUP) -> int:
    """Threads of each of several pods with a model on the same cores, at least 1.

    One core is left to what else runs, if only the pod's own network thread, and the rest is shared out. A step waits
    for its slowest thread at every layer: on two cores, with an SSM drafting and four requests at once, a verifier of
    one thread was more than twice as fast as one of two.
    """
    return max(1, (usable_cores(cgroup) - 1) // max(1, pods))


def _quota(cgroup: Path, unlimited: int) -> int:
    """Cores' worth of time per period, rounded up, by either version of control groups."""
    for files in (("cpu.max",), ("cpu/cpu.cfs_quota_us", "cpu/cpu.cfs_period_us")):
        try:
            quota, period = (int(word) for name in files for word in (cgroup / name).read_text().split())
        except (OSError, ValueError):  # no such file, or "max"
            continue
        if quota > 0 and period > 0:
            return min(unlimited, -(-quota // period))
    return unlimited
