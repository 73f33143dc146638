"""What is refused before the LLM writes a token, and before the student learns one."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from graftree.distill.corpus import Corpus
from graftree.distill.files import check_directory
from graftree.distill.streams import ANSWER
from graftree.distill.trainer import MEASURED, TrainSettings
from graftree.errors import InvalidArgument
from graftree.models.load import configuration
from graftree.models.spec import max_context
from graftree.models.uri import ModelUri


def check_llm(llm: ModelUri, students: Sequence[tuple[int, ...]], length: int) -> None:
    """Whether an LLM can write dialogues of `length` tokens and has the layers that students begin as.

    Raises:
        InvalidArgument: names the layer or the length, and the limit.
    """
    config = configuration(llm)
    for layers in students:
        if len(set(layers)) != len(layers):
            raise InvalidArgument("layers", ",".join(map(str, layers)), "each layer once")
    for layer in (layer for layers in students for layer in layers):
        if layer >= config.num_hidden_layers:
            raise InvalidArgument("layers", layer, f"below the LLM's {config.num_hidden_layers}")
    context = max_context(config.to_dict())
    if context and length > context:
        raise InvalidArgument("length", length, f"at most the LLM's context, {context} tokens")


def check_directories(out: Path, work: Path) -> None:
    """Whether there can be a package and a corpus. Raises InvalidArgument: names DIR or work."""
    check_directory("DIR", out)
    check_directory("work", work)


def check_answers(corpus: Corpus, settings: TrainSettings, shards: int) -> None:
    """Whether the held-out text has anything to measure an SSM by.

    Raises:
        InvalidArgument: none of its tokens is of an answer.
    """
    for held_out in corpus.shards(range(shards - settings.held_out, shards)):
        if (held_out.roles[:MEASURED, 1:] == ANSWER).any():
            return
    raise InvalidArgument("length", corpus.settings.length, "no answers in the held-out text: take more --length or "
                          "--tokens")  # fmt: skip
