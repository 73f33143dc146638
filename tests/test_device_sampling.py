"""`DeviceSampler`: the tokens that `graftree.sampling.choose` picks, for all nodes of many trees at once."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from graftree import device_sampling
from graftree.device_sampling import UNKNOWN, Choice, DeviceSampler
from graftree.errors import GraftreeError, InvalidArgument
from graftree.noise import gumbel, key64
from graftree.sampling import BAN, SamplingContext, SamplingParams, choose
from graftree.tree import TokenTree

VOCAB, COUNT = 97, 90
CPU = torch.device("cpu")


class Every:
    """Allows what a path's hash says, about a third; refuses some paths, and what no walk comes to."""

    def __init__(self) -> None:
        self.asked: list[tuple[int, ...]] = []

    def allowed(self, path: Sequence[int]) -> NDArray[np.bool_]:
        self.asked.append(tuple(path))
        for index in range(len(path) + 1):
            if sum(path[:index]) % 7 == 5:
                raise InvalidArgument("structured_output", "a constraint", "one that is simple enough")
            if index < len(path) and not self._mask(path[:index])[path[index]]:
                raise InvalidArgument("structured_output", f"token {path[index]}", "what is allowed")
        return self._mask(path)

    def advance(self, token_ids: Sequence[int]) -> None:
        """The masks are of paths alone."""

    @staticmethod
    def _mask(path: Sequence[int]) -> NDArray[np.bool_]:
        found = np.array([random.Random(f"{list(path)} {token}").random() < 0.35 for token in range(VOCAB)])
        return found & (sum(path) % 5 != 4)  # or nothing


def random_choice(
    seed: int, options: dict[str, Any], *, nodes: int, min_new_tokens: int = 0, constrained: bool = False
) -> Choice:
    """A session with some text and a tree, whose parameters are `options`."""
    rng = random.Random(seed)
    parents = tuple(rng.randrange(-1, index) for index in range(nodes))
    tree = TokenTree(0, tuple(rng.randrange(12) for _ in parents), parents, (-1.0,) * nodes)
    context = SamplingContext(
        [rng.randrange(VOCAB) for _ in range(9)],
        [rng.randrange(20) for _ in range(rng.randrange(12))],
        vocab_size=VOCAB,
        min_new_tokens=min_new_tokens,
        stop_token_ids=range(0, 40, 3),
        token_count=COUNT,
        constraint=Every() if constrained else None,
    )
    return Choice(SamplingParams(**options), context, tree)


def logits_of(seed: int, choice: Choice, *, coarse: bool = False) -> torch.Tensor:
    logits = torch.randn((len(choice), VOCAB), generator=torch.Generator().manual_seed(seed)) * 3
    return logits.round() if coarse else logits  # whole numbers: many ties


def on_the_host(choice: Choice, logits: torch.Tensor) -> list[int]:
    """One by one; what must be refused is unknown."""
    found = []
    for row, path in zip(logits, choice.paths(), strict=True):
        try:
            found.append(choose(row.numpy(), choice.params, choice.context, path))
        except GraftreeError:
            found.append(UNKNOWN)
    return found


OPTIONS: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0.0},
    "sampled": {"seed": 5},
    "hot": {"seed": (1 << 64) - 1, "temperature": 7.5},
    "top k": {"seed": 6, "top_k": 4, "temperature": 1.3},
    "top k of all": {"seed": 6, "top_k": 5000},
    "top p": {"seed": 7, "top_p": 0.6},
    "min p": {"seed": 8, "min_p": 0.2, "temperature": 0.7},
    "all filters": {"seed": 9, "min_p": 0.01, "top_k": 30, "top_p": 0.9, "temperature": 2.0},
    "bias": {"temperature": 0.0, "logit_bias": {3: 5.0, 4: -2.5, 5: BAN}},
    "biased draw": {"seed": 10, "logit_bias": {3: 5.0, 4: -2.5, 5: BAN}},
    "banned": {"temperature": 0.0, "banned_token_ids": (1, 2, 3, 89)},
    "phrases": {
        "seed": 11,
        "bad_words_token_ids": ((4,), (3, 7), (1, 2, 3), *(((n, m)) for n in range(9) for m in range(9))),
    },
    "allowed": {"seed": 12, "allowed_token_ids": (3, 40, 41, 96)},
    "repetition": {"temperature": 0.0, "repetition_penalty": 1.7},
    "penalties": {"seed": 13, "repetition_penalty": 0.8, "frequency_penalty": 0.7, "presence_penalty": -1.2},
    "everything": {
        "seed": 14,
        "temperature": 0.9,
        "top_k": 50,
        "top_p": 0.95,
        "min_p": 0.001,
        "repetition_penalty": 1.2,
        "frequency_penalty": 0.3,
        "logit_bias": {3: 2.0},
        "banned_token_ids": (1,),
        "bad_words_token_ids": ((4, 5),),
    },
}


@pytest.mark.parametrize("name", OPTIONS)
@pytest.mark.parametrize("coarse", [False, True], ids=["", "ties"])
def test_every_option_as_on_the_host(name: str, coarse: bool) -> None:
    """Each option alone and together, at the root and at nodes, with and without a minimum length, among ties too."""
    sampler = DeviceSampler(VOCAB, COUNT, CPU)
    for seed in range(6):
        choice = random_choice(seed, OPTIONS[name], nodes=(0, 1, 17)[seed % 3], min_new_tokens=seed * 3)
        logits = logits_of(seed, choice, coarse=coarse)
        (got,) = sampler.pick([logits], [choice])
        assert got.tolist() == on_the_host(choice, logits)


def test_the_masks_of_a_constraint() -> None:
    """With every option, at root and nodes, those it refuses and those that leave nothing among them: each has the
    host's token or is left to the host, and what a parent's mask leaves out is not asked about."""
    sampler, unknown, chosen = DeviceSampler(VOCAB, COUNT, CPU), 0, 0
    for seed, options in enumerate(OPTIONS.values()):
        choice = random_choice(seed, options, nodes=17, constrained=True)
        logits = logits_of(seed, choice)
        (got,) = sampler.pick([logits], [choice])
        constraint = choice.context.constraint
        assert isinstance(constraint, Every)
        asked = constraint.asked.copy()
        assert got.tolist() == on_the_host(choice, logits)
        assert all(not path or Every._mask(path[:-1])[path[-1]] for path in asked)
        unknown, chosen = unknown + int((got == UNKNOWN).sum()), chosen + int((got != UNKNOWN).sum())
    assert unknown > 50
    assert chosen > 50


@pytest.mark.parametrize("size", [1, 7, 8, 9, 97, 512])
def test_bits_are_unpacked_as_they_were_packed(size: int) -> None:
    """Vocabularies that fill their last byte and that do not, and no row at all."""
    masks = np.random.default_rng(size).random((5, size)) < 0.5
    packed = torch.from_numpy(np.packbits(masks, axis=1, bitorder="little"))
    assert np.array_equal(device_sampling._unpacked(packed, size).numpy(), masks)
    assert device_sampling._unpacked(packed[:0], size).shape == (0, size)


@settings(max_examples=30, deadline=None)
@given(
    names=st.lists(st.sampled_from(sorted(OPTIONS)), min_size=1, max_size=6),
    seed=st.integers(0, 1000),
    rows_at_once=st.sampled_from((1, 3, 1000)),
)
def test_sessions_of_all_kinds_in_one_step(names: list[str], seed: int, rows_at_once: int) -> None:
    """Whatever shares the step, in whatever order, and however many rows are worked on at once."""
    choices = [
        random_choice(seed + n, OPTIONS[name], nodes=n * 3, constrained=(seed >> n) % 2 == 0)
        for n, name in enumerate(names)
    ]
    logits = [logits_of(seed + n, choice) for n, choice in enumerate(choices)]
    sampler = DeviceSampler(VOCAB, COUNT, CPU)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(device_sampling, "_ELEMENTS", rows_at_once * VOCAB)
        got = sampler.pick(logits, choices)
    assert [tokens.tolist() for tokens in got] == [
        on_the_host(choice, rows) for choice, rows in zip(choices, logits, strict=True)
    ]


def test_a_session_that_goes_on() -> None:
    """What is kept of a session on the device does not get old: text that is committed counts in the next step."""
    sampler = DeviceSampler(VOCAB, COUNT, CPU)
    options = {"temperature": 0.0, "repetition_penalty": 1.5, "frequency_penalty": 1.0, "logit_bias": {2: 1.0}}
    choice = random_choice(3, options, nodes=6, min_new_tokens=14)
    for step in range(12):
        logits = logits_of(step, choice)
        (got,) = sampler.pick([logits], [choice])
        assert got.tolist() == on_the_host(choice, logits)
        choice.context.extend(got[:2].tolist())


@pytest.mark.parametrize("name", ["greedy", "sampled", "all filters", "penalties"])
@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_logits_that_are_not_finite_are_unknown(name: str, value: float) -> None:
    """One such row is left to the host, which refuses it; its neighbours are chosen."""
    choice = random_choice(1, OPTIONS[name], nodes=3)
    logits = logits_of(1, choice)
    logits[2, 11] = value
    (got,) = DeviceSampler(VOCAB, COUNT, CPU).pick([logits], [choice])
    assert got.tolist() == on_the_host(choice, logits)
    assert got[2] == UNKNOWN
    assert UNKNOWN not in got[[0, 1, 3]]


def test_no_token_left_is_unknown() -> None:
    """Where the options leave none, the host says so."""
    options = {"seed": 1, "allowed_token_ids": (5,), "bad_words_token_ids": tuple((n, 5) for n in range(VOCAB))}
    choice = random_choice(2, options, nodes=4)
    logits = logits_of(2, choice)
    (got,) = DeviceSampler(VOCAB, COUNT, CPU).pick([logits], [choice])
    assert got.tolist() == on_the_host(choice, logits)
    assert UNKNOWN in got


def test_the_noise_is_the_hosts() -> None:
    """Gumbel noise over a whole vocabulary: the integers are the same, the logarithms agree to the last bits."""
    seeds = [0, 1, (1 << 64) - 1, 0x9E3779B97F4A7C15]
    keys = np.array([key64(seed, 1000 + seed % 7) for seed in seeds], np.uint64).astype(np.int64)
    got = DeviceSampler(50_000, 0, CPU)._gumbel(torch.from_numpy(keys))
    for row, seed in zip(got, seeds, strict=True):
        np.testing.assert_allclose(
            row.numpy(), gumbel(seed, 1000 + seed % 7, np.arange(50_000)), rtol=1e-13, atol=1e-15
        )
