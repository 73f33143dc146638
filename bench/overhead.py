"""What a round costs beyond draft and verify: router, gRPC and Redis, on stand-ins of fixed step time.

    python -m bench.overhead [--step-ms 20] [--rounds 300] [--concurrency 1 4 16]

Every round of a request ends with one chunk, so the time between two chunks is a round. The stand-in verifier takes
exactly --step-ms, drafting goes on meanwhile; what is left of the round is the pipeline's own cost.
"""

from __future__ import annotations

import asyncio
import sys
import time

import numpy as np

from bench import report
from graftree import AsyncClient, LocalStack


async def request(client: AsyncClient, rounds: int) -> tuple[list[float], float, object]:
    """One request of `rounds` verify steps: the milliseconds between its chunks, and its figures."""
    stamps: list[float] = []
    finished = None
    async for event in client.stream(token_ids=[1, 2, 3, 4], max_new_tokens=rounds * 9, ignore_eos=True):
        if event.token_ids:
            stamps.append(time.perf_counter())
        finished = event
        if len(stamps) > rounds:
            break
    gaps = np.diff(stamps) * 1000
    return gaps[5:].tolist(), len(stamps), finished  # the first rounds carry connection set-up


async def measure(target: str, concurrency: int, rounds: int) -> list[float]:
    async with AsyncClient(target) as client:
        answers = await asyncio.gather(*(request(client, rounds) for _ in range(concurrency)))
    return [gap for gaps, _, _ in answers for gap in gaps]


def main() -> int:
    arguments = report.parser(__doc__.splitlines()[0])
    arguments.add_argument("--step-ms", type=float, default=20.0)
    arguments.add_argument("--rounds", type=int, default=300)
    arguments.add_argument("--concurrency", type=int, nargs="+", default=[1, 4, 16])
    options = arguments.parse_args()
    if options.quick:
        options.rounds = min(options.rounds, 60)
    out = report.Report("overhead")
    model = f"standin:?step_ms={options.step_ms:g}&vocab=512&context=8192"
    with LocalStack(model=model, speculators=["standin"]) as stack:
        for concurrency in options.concurrency:
            gaps = asyncio.run(measure(stack.target, concurrency, options.rounds))
            extra = np.asarray(gaps) - options.step_ms
            p50, p99 = (float(np.percentile(extra, q)) for q in (50, 99))
            target = {"target": "< 2 ms", "met": p50 < 2.0} if concurrency == 1 else {}
            out.add(f"round overhead p50, {concurrency} at once", p50, "ms", **target)
            out.add(f"round overhead p99, {concurrency} at once", p99, "ms")
    return out.finish(options.json)


if __name__ == "__main__":
    sys.exit(main())
