"""A whole stack that tests look into: every pod with the same further keys, every step with drafts."""

from __future__ import annotations

from typing import Any

from graftree import LocalStack

MODEL = "random:llama?layers=1&seed=3"


def observed_stack(options: dict[str, Any]) -> LocalStack:
    """A router, a verifier, an SSM that is the LLM itself, and an n-gram speculator."""
    return LocalStack(
        MODEL,
        [f"model:{MODEL}", "ngram"],
        in_process=True,
        threads=1,
        router_options={"adaptive": False, "draft_wait_ms": 1000.0} | options,
        verifier_options=options,
        speculator_options=options,
    )
