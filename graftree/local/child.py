"""What a child process runs: `python -m graftree.local.child PARENT_PID MODULE FLAGS...`.

It becomes MODULE, after asking the kernel for a SIGKILL when the parent dies: a stack whose owner is killed leaves
nothing behind.
"""

from __future__ import annotations

import ctypes
import os
import runpy
import signal
import sys

_PR_SET_PDEATHSIG = 1


def die_with(parent: int) -> None:
    """Tie this process to the thread of `parent` that started it (Linux; elsewhere this does nothing)."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != parent:  # it died before the line above
            os._exit(1)


if __name__ == "__main__":
    die_with(int(sys.argv[1]))
    module = sys.argv[2]
    del sys.argv[1:3]
    runpy.run_module(module, run_name="__main__", alter_sys=True)
