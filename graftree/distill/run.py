"""`distill`: from an LLM to an SSM package."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel

from graftree.distill.assignment import Assignment
from graftree.distill.card import package
from graftree.distill.checks import check_answers, check_directories, check_llm
from graftree.distill.corpus import Corpus, CorpusSettings
from graftree.distill.streams import Script
from graftree.distill.student import build, choose_tokens
from graftree.distill.trainer import Progress, Trainer, TrainSettings
from graftree.distill.writer import Writer
from graftree.errors import InvalidArgument
from graftree.models.load import computes_bfloat16, configuration, device_of, llm_identity, load
from graftree.models.ssm import SsmCard
from graftree.models.uri import ModelUri
from graftree.progress import Bar
from graftree.text.tokenizer import Tokenizer

MAX_PROMPTS, MAX_PROMPT_TOKENS = 1_000_000, 2048
COUNTED = 8  # shards that the head's tokens are counted in


@dataclass(frozen=True)
class DistillSettings:
    """What is made of which LLM.

    Attributes:
        llm: its URI.
        layers: of the LLM, that the student begins as; () = the first two and the last.
        head_size: tokens it can draft, at most the vocabulary.
        tokens: that the LLM writes, rounded up to whole shards.
        device: of both, cpu or cuda.
        threads: of torch on the CPU; 0 = torch's choice.
        corpus, train: see there. `corpus.llm` and `corpus.prompts` are filled in.
    """

    llm: str
    layers: tuple[int, ...] = ()
    head_size: int = 12_288
    tokens: int = 1_000_000
    device: str = "auto"
    threads: int = 0
    corpus: CorpusSettings = field(default_factory=CorpusSettings)
    train: TrainSettings = field(default_factory=TrainSettings)

    def __post_init__(self) -> None:
        for name, low, high in (("head_size", 2, 1 << 20), ("tokens", 1, 10**12), ("threads", 0, 1024)):
            if not low <= getattr(self, name) <= high:
                raise InvalidArgument(name, getattr(self, name), f"{low} to {high}")

    @property
    def shards(self) -> int:
        """Shards that hold `tokens`, and one more than are held out."""
        size = self.corpus.streams * self.corpus.length
        return max(-(-self.tokens // size), self.train.held_out + 1)


def distill(
    settings: DistillSettings,
    out: Path,
    work: Path,
    *,
    prompts: Sequence[str] = (),
    quiet: bool = False,
    say: Callable[[str], None] = lambda line: None,
) -> SsmCard:
    """Write, train, package. A run that was killed goes on from what is in `work`.

    With more `tokens` than before the corpus grows and the student learns anew, from all of it.

    Args:
        out: directory of the package.
        work: directory of the corpus and the checkpoint.
        prompts: user turns that come before those that the LLM writes itself.
        quiet: no progress bars.
        say: told what begins and what came of it.

    Raises:
        InvalidArgument, Incompatible, Unavailable: as `graftree.models.load.load`; a `work` of another run.
    """
    llm = begin(settings, out, work, [settings.layers])
    layers = settings.layers or default_layers(llm)
    identity = llm_identity(llm)
    corpus = open_corpus(settings, identity, work, prompts)
    path, shards = work / "checkpoint.safetensors", settings.shards
    assignment = Assignment.of(layers, min(settings.head_size, vocabulary(llm)), corpus.settings, shards)
    assignment.check(path)
    write(settings, corpus, prompts, quiet=quiet, say=say)
    tokens = head_tokens(settings, corpus)
    trainer = Trainer(
        student_of(settings, layers, tokens), corpus, tokens, settings.train, shards=shards,
        assignment=assignment.with_tokens(tokens), checkpoint_path=path,
    )  # fmt: skip
    tell_set_aside(trainer, say)
    before = trainer.measure() if trainer.progress.steps == 0 else {}
    trained = (shards - settings.train.held_out) * corpus.shard_tokens
    say(f"training {len(layers)} layers and a head of {len(tokens)} tokens on {trained} tokens of text")
    train(trainer, quiet)
    measures = trainer.measure()
    say("held out: " + ", ".join(f"{name} {100 * value:.1f} %" for name, value in measures.items()))
    recipe = {
        "corpus_tokens": shards * corpus.shard_tokens,
        "trained_tokens": trainer.progress.tokens,
        "training_minutes": round(trainer.progress.seconds / 60, 1),
        "prompts_given": len(prompts),
        **({"top1_before": round(before["top1"], 4)} if before else {}),
    }
    card = SsmCard(str(llm), identity, layers, len(tokens), measures=measures, recipe=recipe)
    package(trainer.student, tokens, card, out)
    say(f"{out}: load it as model:{out}")
    return card


def open_corpus(settings: DistillSettings, identity: str, work: Path, prompts: Sequence[str] = ()) -> Corpus:
    """The corpus of a run, as far as it is there."""
    if len(prompts) > MAX_PROMPTS:
        raise InvalidArgument("prompts", len(prompts), f"at most {MAX_PROMPTS}")
    digest = hashlib.sha256(json.dumps(list(prompts)).encode()).hexdigest() if prompts else ""
    return Corpus(work / "corpus", replace(settings.corpus, llm=identity, prompts=digest))


def write(
    settings: DistillSettings,
    corpus: Corpus,
    prompts: Sequence[str] = (),
    *,
    quiet: bool = False,
    say: Callable[[str], None] = lambda line: None,
) -> None:
    """Let the LLM write what is missing of a corpus.

    Raises:
        InvalidArgument: its held-out text has no answers.
    """
    shards, there = settings.shards, len(corpus)
    if there >= shards:
        check_answers(corpus, settings.train, shards)
        return
    for path in sorted(corpus.damaged):
        say(f"{path} is damaged: it is written again")
    tokenizer = Tokenizer.load(settings.llm)
    script = Script.of(tokenizer)
    given = _fitting(prompts, tokenizer, script, settings.corpus.length, say)
    half = _half(settings.device)
    say(f"{settings.llm} writes {(shards - there) * corpus.shard_tokens} tokens in {half}")
    writer = Writer(load(settings.llm, dtype=half, device=settings.device), top=settings.corpus.top)
    with Bar(total=shards * corpus.shard_tokens, unit="tok", unit_scale=True, disable=quiet) as bar:
        left = corpus.write(
            writer,
            script,
            shards,
            prompts=given,
            progress=lambda count: _advance(bar, count * corpus.shard_tokens),
        )
    if left:
        say(f"{left} of {len(prompts)} prompts were dropped: the dialogues had no room for them; take more --tokens")
    check_answers(corpus, settings.train, shards)


def _fitting(
    prompts: Sequence[str], tokenizer: Tokenizer, script: Script, length: int, say: Callable[[str], None]
) -> list[list[int]]:
    """The prompts, in tokens, that leave room for an answer in a dialogue of `length` tokens."""
    if prompts and not script.chat:
        say(f"all {len(prompts)} prompts were dropped: the LLM has no chat template, so it just writes")
        return []
    given = [tokenizer.encode(text, special_tokens=False)[:MAX_PROMPT_TOKENS] for text in prompts]
    room = length - len(script.start) - len(script.to_answer) - 1
    fitting = [prompt for prompt in given if len(prompt) <= room]
    if len(fitting) < len(given):
        say(
            f"{len(given) - len(fitting)} of {len(given)} prompts were dropped: with an answer they are longer than "
            f"a dialogue of {length} tokens; take more --length"
        )
    return fitting


def train(trainer: Trainer, quiet: bool) -> None:
    minutes = trainer.settings.minutes
    total = round(60 * minutes) if minutes else trainer.total_steps
    with Bar(total=total, unit="s" if minutes else "step", disable=quiet) as bar:

        def tell(progress: Progress, value: float) -> None:
            rate = progress.tokens / max(progress.seconds, 1e-9)
            top1 = trainer.last.get("top1")
            known = "" if top1 is None else f", held-out top-1 {100 * top1:.1f} %"
            bar.set_postfix_str(f"{rate:.0f} tok/s, loss {value:.3f}{known}", refresh=False)
            _advance(bar, round(progress.seconds) if minutes else progress.steps)

        trainer.train(tell)


def _advance(bar: Any, count: int) -> None:
    bar.update(max(0, count - bar.n))


def _half(device: str) -> str:
    """The LLM only writes: bfloat16 where it is computed natively."""
    return "bfloat16" if computes_bfloat16(device_of(device)) else "float32"


def vocabulary(llm: ModelUri) -> int:
    return Tokenizer.load(llm).token_count


def default_layers(llm: ModelUri) -> tuple[int, ...]:
    """The first two and the last, as the lower layers read and the last one speaks."""
    kept = llm.kept_layers or tuple(range(configuration(llm).num_hidden_layers))
    return (*kept[: min(2, len(kept) - 1)], kept[-1])


def begin(settings: DistillSettings, out: Path, work: Path, students: Sequence[tuple[int, ...]]) -> ModelUri:
    """Refuse what cannot come to an end before there is any work, and set torch's threads.

    Raises:
        InvalidArgument: a device, layer, length or directory that cannot be; named.
    """
    device_of(settings.device)
    check_directories(out, work)
    llm = ModelUri.parse(settings.llm)
    check_llm(llm, students, settings.corpus.length)
    if settings.threads:
        torch.set_num_threads(settings.threads)
    return llm


def head_tokens(settings: DistillSettings, corpus: Corpus) -> list[int]:
    """The tokens that a head is given a row for."""
    shards = corpus.shards(range(min(settings.shards, COUNTED)))
    return choose_tokens(shards, vocabulary(ModelUri.parse(settings.llm)), settings.head_size)


def student_of(settings: DistillSettings, layers: tuple[int, ...], tokens: list[int]) -> PreTrainedModel:
    """A new student, where it learns."""
    student = build(ModelUri.parse(settings.llm), layers, tokens)
    torch.nn.Module.to(student, device_of(settings.device))
    return student


def tell_set_aside(trainer: Trainer, say: Callable[[str], None]) -> None:
    """Say that training begins anew, where it does although there was a checkpoint."""
    if trainer.set_aside is not None:
        say(
            f"the checkpoint learned from another amount of text: training begins anew; it is now {trainer.set_aside}"
        )
