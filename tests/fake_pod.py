"""A process that stands for a tier, to test what starts and ends them: `python -m tests.fake_pod --drafter WHAT`."""

from __future__ import annotations

import json
import os
import signal
import sys
import time

WHAT = dict(zip(sys.argv[1::2], sys.argv[2::2], strict=True)).get("--drafter", "") if __name__ == "__main__" else ""


def main(what: str) -> None:
    """Say ready, then wait for a signal; or do what was asked instead."""
    if what == "complain":
        sys.exit("ConfigError: port='x': a number")
    if what == "refuse":
        sys.exit("Incompatible: other vocabulary")
    if what == "crash":
        raise RuntimeError("broken in some way")
    if what == "silent":
        time.sleep(600)
    if what == "stubborn":
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    if what == "noisy":
        print("x" * 200_000, flush=True)
    print("not json", flush=True)
    print(json.dumps({"ready": f"127.0.0.1:{os.getpid()}"}), flush=True)
    if what == "noisy":
        print("x" * 200_000, flush=True)
    time.sleep(600)


if __name__ == "__main__":
    main(WHAT)
