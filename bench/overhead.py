"""What a round costs beyond draft and verify: router, gRPC and Redis, on stand-ins of fixed step time.

    python -m bench.overhead [--step-ms 20] [--rounds 300] [--concurrency 1 4 16]

Every round of a request ends with one chunk, so the time between two chunks is a round. The stand-in verifier takes
exactly --step-ms, drafting goes on meanwhile; what is left of the round is the pipeline's own cost.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
import time
from collections.abc import Sequence

import numpy as np

from bench import report
from graftree import AsyncClient, LocalStack
from graftree.config import RouterConfig


async def request(client: AsyncClient, rounds: int) -> list[float]:
    """One request of about `rounds` verify steps: the milliseconds between its chunks."""
    stamps: list[float] = []
    async with client.stream(token_ids=[1, 2, 3, 4], max_new_tokens=rounds * 9, ignore_eos=True) as stream:
        async for chunk in stream:
            if chunk.token_ids:
                stamps.append(time.perf_counter())
            if len(stamps) > rounds:
                break
    gaps = np.diff(stamps) * 1000
    return gaps[5:].tolist()  # the first rounds carry connection set-up


async def measure(target: str, concurrency: Sequence[int], rounds: int) -> dict[int, list[float]]:
    """Gaps by number of requests at once."""
    gaps: dict[int, list[float]] = {}
    async with AsyncClient(target) as client:
        for count in concurrency:
            answers = await asyncio.gather(*(request(client, rounds) for _ in range(count)))
            gaps[count] = [gap for answer in answers for gap in answer]
    return gaps


async def compare(options: argparse.Namespace, out: report.Report) -> None:
    """Without the draft wait, then with the default one."""
    model = f"standin:?step_ms={options.step_ms:g}&vocab=512&context=8192"
    # Where a step would go without a tree the router may wait for a draft: that is drafting, not overhead, so the
    # target is for rounds without that wait. The default is shown beside it.
    waits = {"": 0.0, ", draft wait as by default": RouterConfig.model_fields["draft_wait_ms"].default}
    for label, wait in waits.items():
        with LocalStack(model=model, speculators=["standin"], router_options={"draft_wait_ms": wait}) as stack:
            measured = await measure(stack.target, options.concurrency, options.rounds)
        for count, gaps in measured.items():
            p50, p99 = (float(np.percentile(np.asarray(gaps) - options.step_ms, q)) for q in (50, 99))
            target = {"target": "< 2 ms", "met": p50 < 2.0} if count == 1 and not wait else {}
            out.add(f"round overhead p50, {count} at once{label}", p50, "ms", **target)
            out.add(f"round overhead p99, {count} at once{label}", p99, "ms")


def main() -> int:
    arguments = report.parser(__doc__.splitlines()[0])
    arguments.add_argument("--step-ms", type=float, default=20.0)
    arguments.add_argument("--rounds", type=int, default=300)
    arguments.add_argument("--concurrency", type=int, nargs="+", default=[1, 4, 16])
    options = arguments.parse_args()
    if options.quick:
        options.rounds = min(options.rounds, 60)
    out = report.Report("overhead")
    asyncio.run(compare(options, out))
    return out.finish(options.json)


if __name__ == "__main__":
    sys.exit(main())
