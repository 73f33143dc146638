"""Whether what is sampled is the LLM's distribution: χ² of the first tokens, per mode, drafts and processors.

    python -m bench.distribution [--samples 200000] [--rule NAME ...] [--drafts NAME ...] [--settings NAME ...]

A random model of eight tokens, so that every continuation of three tokens can be enumerated. The samples go through
`graftree.acceptance.accept` in steps, as the verifier's do, with its logits from one tree step of `TreeRunner` over
all continuations. The exact distribution comes from the same weights in float64, with processors written out here.
Only pure functions are not computed again and again: the processed distribution after each path, and noise
(`bench.known_noise`).
"""

from __future__ import annotations

import itertools
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any
from unittest.mock import patch

import numpy as np
from numpy.typing import NDArray
from scipy import stats

from bench import report
from bench.known_noise import KnownNoise
from graftree import acceptance, noise, sampling
from graftree.acceptance import Rule, accept, draw_proposals
from graftree.proposals import DraftDistribution, Proposals, draft_salt
from graftree.sampling import SamplingContext, SamplingParams, process
from graftree.tree import TokenTree, node_id

Floats = NDArray[np.float64]
Path = tuple[int, ...]

VOCAB, LENGTH = 8, 3
MODEL = (
    f"random:llama?vocab={VOCAB}&layers=2&hidden=32&heads=2&kv_heads=1&intermediate=64&context=64&seed=3&scale=0.6"
)
PROMPT: Path = (1, 5, 2, 2)

SETTINGS = {
    "temperature 1": SamplingParams(),
    "processed": SamplingParams(
        temperature=0.8,
        top_k=6,
        repetition_penalty=1.2,
        presence_penalty=0.4,
        frequency_penalty=-0.3,
        logit_bias={0: 0.7, 3: -0.5},
    ),
}
DRAFTS = {"good": ("good",), "adversarial": ("adversarial",), "merged": ("good", "adversarial")}
SHAPES = 256
BLOCK = 1000


@dataclass(frozen=True)
class Shape:
    """Draws per speculator at a node, and what grows below its first children."""

    counts: tuple[int, ...]
    below: tuple[Shape, ...] = ()

    @classmethod
    def random(cls, rng: np.random.Generator, speculators: int, levels: int = LENGTH) -> Shape:
        counts = tuple(int(count) for count in rng.integers(0, 4, speculators))
        below = int(rng.integers(0, 3)) if levels > 1 else 0
        return cls(counts, tuple(cls.random(rng, speculators, levels - 1) for _ in range(below)))


def logits_of_all_paths(model: str = MODEL) -> dict[Path, Floats]:
    """(V,) logits after every path of up to two tokens, from one tree step behind the prompt's."""
    from graftree.models.load import load
    from graftree.models.runner import Rows, TreeRunner, chain_rows

    paths = [path for depth in range(1, LENGTH) for path in itertools.product(range(VOCAB), repeat=depth)]
    index = {path: i for i, path in enumerate(paths)}
    masks: list[int] = []
    for i, path in enumerate(paths):
        masks.append(1 << i | (masks[index[path[:-1]]] if len(path) > 1 else 0))
    runner = TreeRunner(load(model), kv_tokens=256)
    blocks = runner.pool.allocate(-(-(len(PROMPT) + len(paths)) // runner.kv.block_size))
    (root,) = runner.forward([chain_rows(blocks, 0, PROMPT, logits=[len(PROMPT) - 1])])
    tree = Rows(
        blocks=blocks,
        context_len=len(PROMPT),
        tree_len=0,
        token_ids=[path[-1] for path in paths],
        positions=[len(PROMPT) + len(path) - 1 for path in paths],
        masks=masks,
        logits=range(len(paths)),
    )
    (below,) = runner.forward([tree])
    return {(): root[0].numpy(), **dict(zip(paths, below.numpy(), strict=True))}


def exact_distribution(params: SamplingParams, model: str = MODEL) -> Floats:
    """(V, V, V) probability of the first three tokens: the model in float64, one ordinary forward."""
    import torch

    from graftree.models.load import load

    network = load(model).model.double()
    paths = list(itertools.product(range(VOCAB), repeat=LENGTH - 1))
    with torch.inference_mode():
        logits = network(torch.tensor([[*PROMPT, *path] for path in paths])).logits[:, len(PROMPT) - 1 :].numpy()
    joint = np.ones((VOCAB,) * LENGTH)
    for path, rows in zip(paths, logits, strict=True):
        for depth in range(LENGTH - 1):
            joint[path] *= processed(rows[depth], params, path[:depth])[path[depth]]
        joint[path] *= processed(rows[-1], params, path)
    return joint


def processed(logits: Floats, params: SamplingParams, path: Path) -> Floats:
    """(V,) the distribution of `SETTINGS`' processors, term by term."""
    scores = [float(value) + params.logit_bias.get(token, 0.0) for token, value in enumerate(logits)]
    for token in range(VOCAB):
        if token in PROMPT + path:
            scores[token] *= 1 / params.repetition_penalty if scores[token] > 0 else params.repetition_penalty
        scores[token] -= params.frequency_penalty * path.count(token) + params.presence_penalty * (token in path)
    kept = sorted(scores, reverse=True)[: params.top_k or VOCAB]
    weights = np.array([np.exp(s / params.temperature) if s >= kept[-1] else 0.0 for s in scores])
    return weights / weights.sum()


class Sampler:
    """Samples texts of three tokens by drafting and accepting.

    Args:
        rule: of acceptance.
        drafts: a speculator per entry: "good" has the LLM's distribution with noise, cut to its best 6 tokens;
            "adversarial" the 4 tokens that the LLM likes least, the least liked most. "dishonest" claims the q of
            "good" and gives its most likely tokens instead of draws.
        params: without a seed.
        logits: path -> (V,).

    Attributes:
        log_p: path -> (V,) the processed distribution after it.
    """

    def __init__(
        self, rule: Rule, drafts: Sequence[str], params: SamplingParams, logits: Mapping[Path, NDArray[Any]]
    ) -> None:
        self._rule, self._drafts, self._params, self._logits = rule, drafts, params, logits
        self._output: Path = ()
        rng = np.random.default_rng(17)
        self._shapes = [Shape.random(rng, len(drafts)) for _ in range(SHAPES)]
        self._contexts = {path: SamplingContext(PROMPT, path, vocab_size=VOCAB) for path in logits}
        self.log_p = {path: process(values, params, self._contexts[()], path) for path, values in logits.items()}
        self._q: dict[tuple[int, Path], DraftDistribution] = {}
        self._salt: dict[tuple[int, Path], int] = {}
        for path, log_p in self.log_p.items():
            address = 0
            for token in path:
                address = node_id(address, token)
            for speculator, kind in enumerate(drafts):
                self._q[speculator, path] = _draft(kind, log_p, rng)
                self._salt[speculator, path] = draft_salt(speculator, address)

    def samples(self, seeds: Sequence[int]) -> Iterator[tuple[Path, int]]:
        """`sample` of each seed, with what is known in advance computed once."""
        drafts = [(len(PROMPT) + len(path), salt) for (_, path), salt in self._salt.items()]
        positions = range(len(PROMPT), len(PROMPT) + LENGTH)
        with patch.object(acceptance, "process", self._processed), patch.object(sampling, "process", self._processed):
            for first in range(0, len(seeds), BLOCK):
                block = seeds[first : first + BLOCK]
                with patch.object(noise, "uniform", KnownNoise(block, positions, drafts, VOCAB)):
                    yield from map(self.sample, block)

    def _processed(
        self, logits: NDArray[Any], params: SamplingParams, context: SamplingContext, path: Sequence[int] = ()
    ) -> Floats:
        return self.log_p[(*self._output, *path)]

    def sample(self, seed: int) -> tuple[Path, int]:
        """The first three tokens, and the steps they took."""
        params, output, steps = replace(self._params, seed=seed), Path(), 0
        while len(output) < LENGTH:
            self._output = output
            shape = self._shapes[(seed + 31 * steps) % SHAPES]
            tree, paths, proposals = self._drafted(params, output, shape)
            output += accept(
                tree,
                [self._logits[path] for path in paths].__getitem__,
                params,
                self._contexts[output],
                rule=self._rule,
                proposals=proposals,
            ).token_ids
            steps += 1
        return output[:LENGTH], steps

    def _drafted(
        self, params: SamplingParams, output: Path, shape: Shape
    ) -> tuple[TokenTree, list[Path], dict[int, list[Proposals]]]:
        """Tree, path of every node with the root's last, and proposals. Draws of the last token get no node."""
        tokens, parents, paths = list[int](), list[int](), list[Path]()
        proposals: dict[int, list[Proposals]] = {}
        open_nodes = [(-1, output, shape)]
        while open_nodes:
            node, path, shape = open_nodes.pop()
            drawn = [
                Proposals(q := self._q[speculator, path], self._draw(kind, q, count, params, speculator, path))
                for speculator, (kind, count) in enumerate(zip(self._drafts, shape.counts, strict=True))
                if count
            ]
            if drawn:
                proposals[node] = drawn
            if len(path) == LENGTH - 1:
                continue
            children = dict.fromkeys(token for proposal in drawn for token in proposal.tokens)
            for rank, token in enumerate(children):
                tokens.append(token)
                parents.append(node)
                paths.append((*path, token))
                if rank < len(shape.below):
                    open_nodes.append((len(tokens) - 1, paths[-1], shape.below[rank]))
        return TokenTree(0, tuple(tokens), tuple(parents), (-1.0,) * len(tokens)), [*paths, output], proposals

    def _draw(
        self, kind: str, q: DraftDistribution, count: int, params: SamplingParams, speculator: int, path: Path
    ) -> tuple[int, ...]:
        if kind == "dishonest":
            return tuple(q.ids[:count].tolist())
        return draw_proposals(self._rule, q, count, params, len(PROMPT) + len(path), self._salt[speculator, path])


def _draft(kind: str, log_p: Floats, rng: np.random.Generator) -> DraftDistribution:
    if kind == "adversarial":
        order = np.argsort(log_p, kind="stable")
        return DraftDistribution.of(order[:4], [8, 4, 2, 1])
    return DraftDistribution.truncate(np.maximum(log_p, -6.0) + rng.normal(0, 0.5, VOCAB), 6)


@dataclass(frozen=True)
class Outcome:
    """Counts of the first tokens against what they should be.

    Attributes:
        counts, exact: (V, V, V) and, normalised, the same shape.
        tokens_per_step: sampled tokens, beyond the third not counted, per step.
    """

    counts: NDArray[np.int64]
    exact: Floats
    tokens_per_step: float

    def p_value(self, tokens: int = LENGTH) -> float:
        """Of the χ² test on the first `tokens` tokens; cells that expect fewer than 5 are one cell."""
        later = tuple(range(tokens, LENGTH))
        counts, expected = (array.sum(axis=later).ravel() for array in (self.counts, self.exact * self.counts.sum()))
        impossible = expected < 1e-9
        if counts[impossible].any():
            return 0.0
        large = expected >= 5
        rest = ~large & ~impossible
        observed, due = counts[large], expected[large]
        if rest.any():
            observed, due = np.append(observed, counts[rest].sum()), np.append(due, expected[rest].sum())
        return float(stats.chisquare(observed, due).pvalue)

    @cached_property
    def distance(self) -> float:
        """Total variation between sample and exact distribution, sampling noise included."""
        return 0.5 * float(np.abs(self.counts / self.counts.sum() - self.exact).sum())


def run(sampler: Sampler, exact: Floats, samples: int, first_seed: int = 0) -> Outcome:
    """Sample with the seeds from `first_seed` on."""
    counts, steps = np.zeros((VOCAB,) * LENGTH, dtype=np.int64), 0
    for tokens, taken in sampler.samples(range(first_seed, first_seed + samples)):
        counts[tokens] += 1
        steps += taken
    return Outcome(counts, exact, samples * LENGTH / steps)


def main() -> int:
    arguments = report.parser(__doc__.splitlines()[0])
    arguments.add_argument("--samples", type=int, default=200_000)
    arguments.add_argument("--first-seed", type=int, default=0)
    arguments.add_argument("--rule", nargs="+", choices=[rule.name for rule in Rule], default=[r.name for r in Rule])
    arguments.add_argument("--drafts", nargs="+", choices=list(DRAFTS), default=list(DRAFTS))
    arguments.add_argument("--settings", nargs="+", choices=list(SETTINGS), default=list(SETTINGS))
    options = arguments.parse_args()
    if options.quick:
        options.samples = min(options.samples, 3000)
    out, logits, details = report.Report("distribution"), logits_of_all_paths(), []
    for setting in options.settings:
        exact = exact_distribution(SETTINGS[setting])
        for drafts, name in itertools.product(options.drafts, options.rule):
            started = time.time()
            outcome = run(
                Sampler(Rule[name], DRAFTS[drafts], SETTINGS[setting], logits),
                exact,
                options.samples,
                options.first_seed,
            )
            p_value = outcome.p_value()
            label = f"{setting}, {drafts}, {name}"
            out.add(label, p_value, "p of χ²", "> 0.01", p_value > 0.01)
            details.append(
                {
                    "case": label,
                    "samples": options.samples,
                    "p_value": {tokens: outcome.p_value(tokens) for tokens in range(1, LENGTH + 1)},
                    "total_variation": outcome.distance,
                    "tokens_per_step": outcome.tokens_per_step,
                    "seconds": round(time.time() - started, 1),
                }
            )
            print(
                f"{label}: p = {p_value:.3f}, {outcome.tokens_per_step:.2f} tokens a step",
                file=sys.stderr,
                flush=True,
            )
    out.details = {"model": MODEL, "cases": details}
    return out.finish(options.json)


if __name__ == "__main__":
    sys.exit(main())
