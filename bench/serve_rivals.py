"""One request at a time against other engines, on the same prompts, in turn."""

from __future__ import annotations

import math
import statistics
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from itertools import chain
from typing import NamedTuple

from bench.recording import Prompt
from bench.report import Report
from bench.rivals import Rival, RivalError
from bench.serve_turns import Service
from bench.tables import ALL, Table

OURS, PLAIN = "graftree", "graftree, plain"
MUST_BEAT = "transformers"  # whose every way is to be slower in every category
REFERENCE = "transformers greedy"
ALTERNATIVES = 20

Answer = Callable[[Prompt], tuple[tuple[int, ...], float]]  # tokens, and the seconds they took


class Timed(NamedTuple):
    """One answer."""

    prompt: Prompt
    token_ids: tuple[int, ...]
    seconds: float


@dataclass
class Match:
    """What every engine said to the same prompts.

    Attributes:
        answers: by engine, prompts in the same order for each.
        absent: engine -> why it did not take part.
        settings: engine -> version and setting.
        margins: by how many nats our token was ahead of the reference's where the two answers part.
    """

    answers: dict[str, list[Timed]] = field(default_factory=dict)
    absent: dict[str, str] = field(default_factory=dict)
    settings: dict[str, str] = field(default_factory=dict)
    margins: list[float] = field(default_factory=list)

    def rate(self, name: str, category: str = ALL) -> float:
        """Tokens per second, prompts included; NaN without an answer."""
        chosen = [each for each in self.answers.get(name, ()) if category in (ALL, each.prompt.category)]
        seconds = sum(each.seconds for each in chosen)
        return sum(len(each.token_ids) for each in chosen) / seconds if seconds else math.nan

    def hear(self, name: str, prompt: Prompt, answer: Answer) -> None:
        """Ask an engine; one that gives up is out of the match, with what it said so far."""
        try:
            self.answers.setdefault(name, []).append(Timed(prompt, *answer(prompt)))
        except RivalError as error:
            self.absent[name] = str(error)
            del self.answers[name]

    @property
    def categories(self) -> list[str]:
        return list(dict.fromkeys(each.prompt.category for each in self.answers.get(OURS, ())))


def play(
    service: Service, rivals: Mapping[str, Rival], prompts: Sequence[Prompt], max_new_tokens: int, match: Match
) -> None:
    """Every engine answers every prompt; who begins goes round.

    Args:
        rivals: name -> started one; those that do not come up are noted in `match` and left out.
    """
    engines: dict[str, Answer] = {
        OURS: partial(_own, service, off=False),
        PLAIN: partial(_own, service, off=True),
    }
    for name, rival in rivals.items():
        try:
            rival.await_ready()
        except RivalError as error:
            match.absent[name] = str(error)
            continue
        for way, setting in rival.settings.items():
            full = f"{name} {way}"
            match.settings[full] = ", ".join([rival.version, *(f"{k} {v}" for k, v in setting.items())])
            engines[full] = partial(_theirs, rival, way, max_new_tokens)
    names = list(engines)
    for index, prompt in enumerate(prompts):
        shift = index % len(names)
        for name in chain(names[shift:], names[:shift]):
            if name not in match.absent:
                match.hear(name, prompt, engines[name])
        print(f"\r{index + 1}/{len(prompts)} prompts", end="", file=sys.stderr, flush=True)
    print(file=sys.stderr)


def _own(service: Service, prompt: Prompt, *, off: bool) -> tuple[tuple[int, ...], float]:
    turn = service.batch([prompt], 1, off=off)
    return turn.results[0].token_ids, turn.seconds


def _theirs(rival: Rival, way: str, max_new_tokens: int, prompt: Prompt) -> tuple[tuple[int, ...], float]:
    return rival.generate(way, prompt.token_ids, max_new_tokens)


def compare(service: Service, match: Match) -> None:
    """Where our answers and the reference's part: how much our token was ahead of its."""
    for ours, theirs in _parted(match):
        places = (i for i, (a, b) in enumerate(zip(ours.token_ids, theirs.token_ids, strict=False)) if a != b)
        if (place := next(places, None)) is None:
            match.margins.append(math.inf)  # one ends where the other goes on
            continue
        result = service.plainly(ours.prompt, ALTERNATIVES)
        entry = result.log_probs[place]
        known = dict(entry.alternatives) | {entry.token_id: entry.log_prob}
        margin = entry.log_prob - known.get(theirs.token_ids[place], -math.inf)
        match.margins.append(margin if result.token_ids[: place + 1] == ours.token_ids[: place + 1] else math.nan)


def _parted(match: Match) -> list[tuple[Timed, Timed]]:
    pairs = zip(match.answers[OURS], match.answers.get(REFERENCE, match.answers[OURS]), strict=True)
    return [(ours, theirs) for ours, theirs in pairs if ours.token_ids != theirs.token_ids]


def summary(match: Match, out: Report) -> None:
    """Tables and targets."""
    categories = [*match.categories, ALL]
    rates = Table.of(
        "tokens/s, 1 request",
        categories,
        match.answers,
        lambda name: (match.rate(name, category) for category in categories),
    )
    others = [name for name in match.answers if name != OURS]
    ratios = Table.of(
        "graftree over",
        categories,
        others,
        lambda name: (match.rate(OURS, category) / match.rate(name, category) for category in categories),
    )
    for table in (rates, ratios):
        print(f"\n{table}")
    for name, values in ratios.rows:
        by_category = list(zip(match.categories, values, strict=False))
        for category, ratio in by_category:
            if name.startswith(MUST_BEAT):
                out.add(f"{category}: graftree over {name}", ratio, "x", "> 1", ratio > 1)
        out.add(f"mean of the categories: graftree over {name}", statistics.mean(r for _, r in by_category), "x")
    if REFERENCE in match.answers:
        count, parted = len(match.answers[OURS]), _parted(match)
        out.add("same tokens as transformers greedy", count - len(parted), f"of {count}", "all but near-ties")
        if match.margins:
            out.add("widest margin where they part", max(match.margins), "nats")
    for name, setting in match.settings.items():
        out.add(f"{name}: runs as", setting)
    for name, why in match.absent.items():
        out.add(f"{name}: absent", why)
    out.details["rivals"] = {"tables": [rates.details(), ratios.details()], "margins": match.margins}


def run(
    service: Service,
    rivals: Mapping[str, Callable[[], Rival]],
    prompts: Sequence[Prompt],
    max_new_tokens: int,
    out: Report,
) -> None:
    """The whole section."""
    match = Match()
    with ExitStack() as stack:
        started = {name: stack.enter_context(start()) for name, start in rivals.items()}
        play(service, started, prompts, max_new_tokens, match)
    compare(service, match)
    summary(match, out)
