"""Drafting while the verifier works: a round takes max(verify, draft), not their sum.

    python -m bench.draft_ahead [--verify-ms 20] [--draft-ms 1 2.5 5 10] [--hit-rate 1 0.95 0.8] [--depth 8]

Stand-ins of configured step times on processes of their own: the verifier takes --verify-ms a step, the drafter
--draft-ms for each level of a chain, each of its tokens right with a chance of --hit-rate. Where a branch hits (a
whole tree is accepted, and what follows was drafted meanwhile) the next tree is there when the verdict comes.
Drafting behind the verdict would take the tree's levels one after another and then the verify step: that sum is
beside. The router does not wait for a late level, so a slow drafter gives smaller trees, not longer rounds.
"""

from __future__ import annotations

import asyncio
import math
import sys
import time
from dataclasses import dataclass

import numpy as np

from bench import report
from bench.tables import Table
from graftree import AsyncClient, LocalStack
from graftree.sdk.options import SpeculationOptions
from graftree.sdk.results import SpeculationStats

VOCAB = 4096
SKIPPED = 10  # first rounds: the chain has to get ahead
TOLERANCE_MS = 3.0


@dataclass(frozen=True)
class Case:
    """What was measured with one pair of stand-ins.

    Attributes:
        verify_ms, draft_ms, hit_rate: as configured.
        rounds_ms: time from chunk to chunk.
        stats: of the request.
    """

    verify_ms: float
    draft_ms: float
    hit_rate: float
    rounds_ms: tuple[float, ...]
    stats: SpeculationStats

    @property
    def round_ms(self) -> float:
        """Median."""
        return float(np.median(self.rounds_ms))

    @property
    def nodes(self) -> float:
        """Mean draft tokens per round."""
        return self.stats.num_draft_tokens / self.stats.num_spec_steps

    @property
    def tokens(self) -> float:
        """Mean tokens per round."""
        return self.stats.mean_acceptance_length

    @property
    def hits(self) -> float:
        """Share of rounds whose branch had survived."""
        return self.stats.num_branch_hits / self.stats.num_spec_steps

    @property
    def overlapped_ms(self) -> float:
        """max(verify, draft): drafting the tokens of a round takes a level each."""
        return max(self.verify_ms, self.tokens * self.draft_ms)

    @property
    def sequential_ms(self) -> float:
        """verify + draft, for a tree as deep as those that were verified."""
        return self.verify_ms + self.nodes * self.draft_ms


async def request(target: str, tokens: int, depth: int) -> tuple[list[float], SpeculationStats]:
    """One request: milliseconds of its rounds, and its figures."""
    stamps: list[float] = []
    speculation = SpeculationOptions(max_nodes=depth, max_depth=depth)
    async with AsyncClient(target) as client:
        options = {"max_new_tokens": tokens, "ignore_eos": True, "speculation": speculation}
        async with client.stream(token_ids=[1, 2, 3, 4], **options) as stream:
            async for chunk in stream:
                if chunk.token_ids:
                    stamps.append(time.perf_counter())
            stats = stream.result.speculation
    return (np.diff(stamps)[SKIPPED:] * 1000).tolist(), stats


def measure(verify_ms: float, draft_ms: float, hit_rate: float, *, rounds: int, depth: int) -> Case:
    """Start the pair, send one request."""
    levels = max(1, min(depth, int(verify_ms / draft_ms) if draft_ms else depth))
    tokens = math.ceil((rounds + SKIPPED) * sum(hit_rate**level for level in range(levels + 1)))
    model = f"standin:?step_ms={verify_ms:g}&vocab={VOCAB}&context=65536"
    drafter = f"standin?step_ms={draft_ms:g}&hit_rate={hit_rate:g}"
    options = {"draft_wait_ms": 0.0}  # what is late is not waited for
    with LocalStack(model, [drafter], router_options=options) as stack:
        rounds_ms, stats = asyncio.run(request(stack.target, tokens, depth))
    return Case(verify_ms, draft_ms, hit_rate, tuple(rounds_ms), stats)


COLUMNS = ("round", "max", "sum", "nodes", "tokens", "hits", "ms/token", "sum/token")


def row(case: Case) -> tuple[float, ...]:
    """The numbers under `COLUMNS`."""
    return (
        case.round_ms,
        case.overlapped_ms,
        case.sequential_ms,
        case.nodes,
        case.tokens,
        case.hits,
        case.round_ms / case.tokens,
        case.sequential_ms / case.tokens,
    )


def name(case: Case) -> str:
    """Of its row."""
    return f"verify {case.verify_ms:g} ms, draft {case.draft_ms:g} ms a level, hit rate {case.hit_rate:g}"


def figures(out: report.Report, case: Case) -> None:
    """What is wanted of a case: only where every branch hits is the time of a round that of a hit."""
    if case.hit_rate < 1:
        out.add(f"{name(case)}: branch hits", case.hits, "of rounds")
        return
    out.add(f"{name(case)}: branch hits", case.hits, "of rounds", "> 0.9", case.hits > 0.9)
    over = case.round_ms - case.overlapped_ms
    out.add(f"{name(case)}: round - max(verify, draft)", over, "ms", f"<= {TOLERANCE_MS:g}", over <= TOLERANCE_MS)
    gain = case.sequential_ms / case.round_ms
    out.add(f"{name(case)}: sum / round", gain, "x", "> 1", gain > 1)


def main() -> int:
    arguments = report.parser(__doc__.splitlines()[0])
    arguments.add_argument("--verify-ms", type=float, default=20.0)
    arguments.add_argument("--draft-ms", type=float, nargs="+", default=[1.0, 2.5, 5.0, 10.0], help="per level")
    arguments.add_argument("--hit-rate", type=float, nargs="+", default=[1.0, 0.95, 0.8])
    arguments.add_argument("--depth", type=int, default=8, help="of the trees that are verified, one node a level")
    arguments.add_argument("--rounds", type=int, default=150)
    options = arguments.parse_args()
    if options.quick:
        options.draft_ms, options.hit_rate, options.rounds = options.draft_ms[1:3], options.hit_rate[:1], 60
    out = report.Report("draft ahead")
    cases = [
        measure(options.verify_ms, draft_ms, hit_rate, rounds=options.rounds, depth=options.depth)
        for hit_rate in options.hit_rate
        for draft_ms in options.draft_ms
    ]
    rows = {name(case): row(case) for case in cases}
    table = Table.of("milliseconds", COLUMNS, rows, rows.__getitem__)
    print(f"\n{table}")
    for case in cases:
        figures(out, case)
    out.details = {"table": table.details(), "rounds_ms": [[round(ms, 2) for ms in case.rounds_ms] for case in cases]}
    return out.finish(options.json)


if __name__ == "__main__":
    sys.exit(main())
