"""The autoscaling benchmark in small: real router, real registry, speculators that come, die and go."""

from __future__ import annotations

from dataclasses import replace

from bench.autoscale import CAPACITY, MANIFEST, Lab
from bench.day import arrivals
from bench.scaling import Scaler, ScalerConfig
from graftree.local_stack import LocalStack
from graftree.models.standin import next_token

VOCAB = 512
FASTER = 60.0


async def test_a_short_day() -> None:
    """Pods come with the load, some are killed with their node, and every answer is the model's own, to the token."""
    config = replace(ScalerConfig.read(MANIFEST), threshold=20.0).faster(FASTER)
    requests = arrivals(8.0, 4.0, seed=1)
    with LocalStack(
        f"standin:?step_ms=50&vocab={VOCAB}&context=4096",
        [],
        in_process=True,
        threads=1,
        router_options={"lease_seconds": 0.5, "tree_depth": 6},
        verifier_options={"lease_seconds": 0.5},
        speculator_options={"lease_seconds": 0.5, "drain_seconds": 0.2, **CAPACITY},
    ) as stack:
        lab = Lab(stack, "standin?step_ms=10&hit_rate=0.8", FASTER)
        tokenizer = lab.router.instance.tokenizer
        course = await lab.day(8.0, requests, Scaler(config, 1), 1)
        lab.pool.scale(0)
        await lab.pool.settle()
    assert course.errors == []
    assert sorted(course.tokens) == list(range(len(requests)))
    for place, tokens in course.tokens.items():
        text = tokenizer.encode(requests[place].prompt)
        for token in tokens:
            text = [*text, next_token(text[-1], len(text), VOCAB)]
            assert token == text[-1]
    assert max(wanted for _, _, wanted, _ in course.samples) > 1
    assert max(alive for _, _, _, alive in course.samples) > 1
    assert course.pod_seconds > 0
