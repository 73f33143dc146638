"""Three answers from a real model, with and without speculation: `make demo`.

Both runs of a prompt use the same stack, one after the other, greedy; the only difference is the request's
`speculation` option. Rates are completion tokens over the router's total time of the request.
"""

from __future__ import annotations

import argparse
import sys

from graftree import Client, LocalStack, Result
from graftree.cli.stack import tell
from graftree.config import DEFAULT_MODEL, default_speculators
from graftree.errors import GraftreeError

PROMPTS = {
    "A question": "Why is the sky blue? Answer in three sentences.",
    "A summary": (
        "Summarize this paragraph in one or two sentences.\n\n"
        "Honey bees tell each other where to find flowers by dancing. A bee that comes home from a good place runs "
        "in a straight line across the comb while it shakes its body, then turns back in a half circle and runs the "
        "line again. The angle between the line and the vertical is the angle between the flowers and the sun, and "
        "the longer the run lasts, the farther away the flowers are. The bees that follow the dancer in the dark "
        "hive feel the movement with their antennae, and then fly straight to the place without ever having seen it."
    ),
    "Some code": (
        "Repeat this code with the name `total` changed to `count`, and nothing else.\n\n"
        "```python\n"
        "def word_lengths(words):\n"
        "    total = 0\n"
        "    lengths = []\n"
        "    for word in words:\n"
        "        lengths.append(len(word))\n"
        "        total = total + len(word)\n"
        "    return lengths, total\n"
        "```"
    ),
}


def main() -> int:
    """Start a stack, answer, compare; returns the exit code: 0 where all pairs of answers are identical."""
    parser = argparse.ArgumentParser(prog="python -m bench.demo", description=__doc__)
    parser.add_argument("--model", default=DEFAULT_MODEL)
    parser.add_argument("--speculator", action="append", help="default: ngram and the shipped SSM")
    parser.add_argument("--max-new-tokens", type=int, default=96)
    chosen = parser.parse_args()
    try:
        with (
            LocalStack(chosen.model, chosen.speculator or default_speculators(chosen.model), notify=tell) as stack,
            Client(stack.target) as client,
        ):
            return _answer_all(client, chosen.max_new_tokens)
    except GraftreeError as error:
        tell(str(error))
        return 1


def _answer_all(client: Client, max_new_tokens: int) -> int:
    def answer(prompt: str, speculation: bool) -> Result:
        chat = [{"role": "user", "content": prompt}]
        return client.generate(chat=chat, max_new_tokens=max_new_tokens, speculation=speculation)

    client.generate("Warm up.", max_new_tokens=8)
    pairs: list[tuple[str, Result, Result]] = []
    for title, prompt in PROMPTS.items():
        print(f"\n=== {title} ===\n{prompt}\n--- answer ---", flush=True)
        drafted = answer(prompt, speculation=True)
        print(drafted.text.strip(), flush=True)
        pairs.append((title, drafted, answer(prompt, speculation=False)))
    print()
    _print_table(pairs)
    identical = all(drafted.token_ids == plain.token_ids for _, drafted, plain in pairs)
    print(f"\nThe tokens with and without speculation are {'identical' if identical else 'NOT identical'}.")
    return 0 if identical else 1


def _print_table(pairs: list[tuple[str, Result, Result]]) -> None:
    head = (
        "",
        "tokens",
        "verify steps",
        "mean acceptance length",
        "tokens/s",
        "without speculation",
        "speed-up",
        "same",
    )
    rows = [head]
    for title, drafted, plain in pairs:
        rate, base = tokens_per_second(drafted), tokens_per_second(plain)
        rows.append(
            (
                title,
                str(drafted.usage.completion_tokens),
                str(drafted.speculation.num_spec_steps),
                f"{drafted.speculation.mean_acceptance_length:.2f}",
                f"{rate:.1f}",
                f"{base:.1f}",
                f"{rate / base:.2f}x",
                "yes" if drafted.token_ids == plain.token_ids else "NO",
            )
        )
    widths = [max(len(row[column]) for row in rows) for column in range(len(head))]
    for row in rows:
        first, *others = (
            cell.ljust(width) if i == 0 else cell.rjust(width)
            for i, (cell, width) in enumerate(zip(row, widths, strict=True))
        )
        print("  ".join([first, *others]))


def tokens_per_second(result: Result) -> float:
    """Completion tokens over the router's total time."""
    return result.usage.completion_tokens / (result.timings.total_ns / 1e9)


if __name__ == "__main__":
    sys.exit(main())
