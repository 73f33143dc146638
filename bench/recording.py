"""What the LLM says after each prompt, recorded once.

Under the default acceptance rule a request's tokens do not depend on what is drafted (`graftree.acceptance`), so one
plain run of the LLM says how every tree of every speculator fares. Recordings are kept in a file per model and
temperature, line by line as prompts finish: a run that was stopped goes on where it was.
"""

from __future__ import annotations

import json
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from bench.lab import Decoder
from graftree.sampling import SamplingContext, SamplingParams, choose
from graftree.text.tokenizer import Tokenizer

AT_ONCE = 16  # prompts
LONGEST_PROMPT = 2048


@dataclass(frozen=True)
class Prompt:
    """One prompt of the set.

    Attributes:
        question_id, category: as the set has them.
        token_ids: with the chat template, as the router makes them.
    """

    question_id: int
    category: str
    token_ids: tuple[int, ...]


@dataclass(frozen=True)
class Recording:
    """One answer.

    Attributes:
        output: what plain decoding says, an end-of-sequence token included.
        temperature, seed: of the request.
        ended: `output` is all there is to say; otherwise it was cut at the length asked for.
    """

    prompt: Prompt
    output: tuple[int, ...]
    temperature: float
    seed: int
    ended: bool

    @property
    def params(self) -> SamplingParams:
        """Of the request."""
        return SamplingParams(temperature=self.temperature, seed=self.seed)

    def first(self, tokens: int) -> Recording:
        """Its first `tokens` tokens."""
        return replace(self, output=self.output[:tokens], ended=self.ended and len(self.output) <= tokens)


def prompts(lines: Sequence[dict[str, Any]], tokenizer: Tokenizer, per_category: int) -> list[Prompt]:
    """`per_category` prompts of each category, evenly spread, none longer than `LONGEST_PROMPT` tokens."""
    by_category: dict[str, list[Prompt]] = {}
    for line in lines:
        token_ids = tuple(tokenizer.encode_chat([{"role": "user", "content": line["turns"][0]}]))
        if len(token_ids) <= LONGEST_PROMPT:
            prompt = Prompt(line["question_id"], line["category"], token_ids)
            by_category.setdefault(prompt.category, []).append(prompt)
    chosen: list[Prompt] = []
    for found in by_category.values():
        count = min(per_category, len(found))
        chosen += [found[i * len(found) // count] for i in range(count)]
    return chosen


class Recorder:
    """Records, and remembers in a directory.

    Args:
        model: the LLM; loaded when something is not on record.
        fingerprint: of its weights, so that another model's recordings are not taken for its own.
        directory: where recordings are kept.
        tokens: length of an answer.
    """

    def __init__(self, model: str, fingerprint: str, directory: Path, tokens: int) -> None:
        self._model, self._fingerprint, self._directory, self._tokens = model, fingerprint, directory, tokens
        directory.mkdir(parents=True, exist_ok=True)

    def record(self, prompts: Sequence[Prompt], temperatures: Sequence[float]) -> list[Recording]:
        """Every prompt at every temperature; a prompt's seed is its question id."""
        found = {temperature: self._read(temperature) for temperature in temperatures}
        missing: dict[Prompt, list[float]] = {}
        for prompt in prompts:
            lacking = [t for t in temperatures if not self._long_enough(found[t].get(prompt))]
            if lacking:
                missing[prompt] = lacking
        for recording in self._say(missing):
            self._append(recording)
            found[recording.temperature][recording.prompt] = recording
        return [found[t][prompt].first(self._tokens) for t in temperatures for prompt in prompts]

    def _long_enough(self, recording: Recording | None) -> bool:
        return recording is not None and (recording.ended or len(recording.output) >= self._tokens)

    def _path(self, temperature: float) -> Path:
        return self._directory / f"recordings-{self._fingerprint[:16]}-t{temperature:g}.jsonl"

    def _read(self, temperature: float) -> dict[Prompt, Recording]:
        path = self._path(temperature)
        recordings: dict[Prompt, Recording] = {}
        for line in path.read_text().splitlines() if path.exists() else ():
            entry = json.loads(line)
            given = entry.pop("prompt")
            prompt = Prompt(given["question_id"], given["category"], tuple(given["token_ids"]))
            recordings[prompt] = Recording(prompt, **{**entry, "output": tuple(entry["output"])})
        return recordings

    def _append(self, recording: Recording) -> None:
        with self._path(recording.temperature).open("a") as file:
            file.write(json.dumps(asdict(recording), separators=(",", ":")) + "\n")

    def _say(self, wanted: dict[Prompt, list[float]]) -> Iterator[Recording]:
        """Plain decoding, many prompts at once; temperatures of a prompt share its prefill."""
        todo = sorted(wanted, key=lambda prompt: len(prompt.token_ids))
        if not todo:
            return
        longest = len(todo[-1].token_ids)
        most = Counter(len(temperatures) for temperatures in wanted.values())
        texts = AT_ONCE * max(most)
        llm = Decoder(self._model, kv_tokens=AT_ONCE * longest + texts * (self._tokens + 64))
        for first in range(0, len(todo), AT_ONCE):
            yield from self._together(llm, {prompt: wanted[prompt] for prompt in todo[first : first + AT_ONCE]})
            done = min(first + AT_ONCE, len(todo))
            print(f"\rrecorded {done}/{len(todo)} prompts", end="", file=sys.stderr, flush=True)
        print(file=sys.stderr)

    def _together(self, llm: Decoder, wanted: dict[Prompt, list[float]]) -> Iterator[Recording]:
        spec = llm.runner.spec
        running = []
        for prompt, temperatures in wanted.items():
            cursors = llm.open(prompt.token_ids, len(temperatures), self._tokens)
            for cursor, temperature in zip(cursors, temperatures, strict=True):
                context = SamplingContext(
                    prompt.token_ids, vocab_size=spec.vocab_size, token_count=spec.token_count or None
                )
                running.append((Recording(prompt, (), temperature, prompt.question_id, False), cursor, context))
        while running:
            rows = llm.step([cursor for _, cursor, _ in running])
            going = []
            for (recording, cursor, context), logits in zip(running, rows, strict=True):
                token = choose(logits, recording.params, context)
                context.extend([token])
                cursor.pending.append(token)
                grown = replace(recording, output=(*recording.output, token), ended=token in spec.eos_token_ids)
                if grown.ended or len(grown.output) >= self._tokens:
                    yield grown
                else:
                    going.append((grown, cursor, context))
            running = going
        llm.close()
