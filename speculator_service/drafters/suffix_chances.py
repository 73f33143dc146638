"""What may follow a context, from where it and its suffixes occurred before: chances that come true.

Prediction by partial matching (Cleary, Witten, 1984) with escape chances that depend on the context as in PPMZ
(Bloom, 1998): from the longest suffix to the shortest, each gives a part of what the longer ones left to the tokens
that followed it and none of those. The part is the chance that the LLM says one of them,

    sigmoid(B + L log length + N log n + T log t + F [a longer suffix matched] + S temperature)

for n occurrences of t such tokens; within it a token weighs its occurrences less 0.3, and 0.3 more if it came last.
Evidence for short suffixes is thin where much followed (T), and an LLM that samples repeats itself less (S).

Fitted by maximum likelihood to 11,900 tokens that SmolLM2-135M said, greedily and at temperature 1, in answer to 39
prompts written for this purpose (questions, stories, arithmetic, code, summaries of licences and manuals, passages to
answer from, extraction, translation, second turns). Fitted to either half of the prompts the loss on the other is
the same to 1 %. On trees of 16 nodes promise and outcome differ by 0.014 on average over the greedy texts and by
0.010 over the others (with interpolated Witten-Bell by 0.029 and 0.060).
"""

from __future__ import annotations

import math

from speculator_service.drafters.suffix_automaton import Match, SuffixAutomaton

BASE, LENGTH, OCCURRENCES, TOKENS, FURTHER, SAMPLED = -1.0, 1.25, 1.5, -1.4, -0.5, -0.7
DISCOUNT = LATEST = 0.3
_ENOUGH = 0.005  # what shorter suffixes could still add


def continuations(automaton: SuffixAutomaton, match: Match, *, temperature: float, most: int) -> dict[int, float]:
    """Tokens that may follow a context.

    Args:
        automaton: the text.
        match: where the context is in it.
        temperature: of the request; above 1 it counts as 1.
        most: tokens of each suffix that are looked at, those that followed latest.

    Returns:
        Token -> chance that the LLM says it, summing to less than 1; empty where nothing matches.
    """
    chances: dict[int, float] = {}
    left, base = 1.0, BASE + SAMPLED * min(temperature, 1.0)
    for state, length in automaton.suffixes(match):
        fresh = [entry for entry in automaton.followers(state, most) if entry[0] not in chances]
        if not fresh:
            continue
        occurrences = sum(count for _, count in fresh)
        odds = base + LENGTH * math.log(length) + OCCURRENCES * math.log(occurrences) + TOKENS * math.log(len(fresh))
        if chances:
            odds += FURTHER
        part = 1.0 / (1.0 + math.exp(-odds))
        unit = left * part / (occurrences - DISCOUNT * len(fresh) + LATEST)
        for token, count in fresh:
            chances[token] = unit * (count - DISCOUNT)
        chances[fresh[0][0]] += unit * LATEST
        left *= 1.0 - part
        if left < _ENOUGH:
            break
    return chances
