"""Load or prefill: the arithmetic of both, on made-up rates and a clock that is set by hand."""

from __future__ import annotations

import pytest

from graftree.step_time import StepTime
from verifier_service.kv_choice import Choice, LoadTimes

SIZE, STEP = 16, 64
MODEL = StepTime((1, 65), (0.010, 0.074), per_context_token=1e-5)  # 9 ms and 1 ms a row


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def choice(latency: float = 0.005, transfer: float = 0.002, **options: object) -> tuple[Choice, Clock]:
    """Loading takes 5 ms and 2 ms a block, of 16 tokens, which take 16 ms to compute."""
    clock = Clock()
    times = LoadTimes(clock)
    times.looked_up(latency)
    times.loaded(10, 10 * transfer)
    values = {"block_size": SIZE, "step_tokens": STEP, "wait_seconds": 1.0, "step_time": lambda: MODEL} | options
    return Choice(times, **values), clock  # type: ignore[arg-type]


def test_what_blocks_save() -> None:
    """By hand: 100 rows in forwards of 64 and 36, against the 36 rows that are left with four blocks loaded."""
    chosen, _ = choice()
    whole = (0.009 + 0.064) + (0.009 + 0.036 + 64 * 1e-5)
    rest = 0.009 + 0.036 + 64 * 1e-5
    assert chosen.saved(0, 4, 100) == pytest.approx(whole - rest)
    assert chosen.saved(0, 6, 97) == pytest.approx(0.073 + 0.009 + 0.033 + 64e-5 - (0.009 + 0.001 + 96e-5))
    assert chosen.saved(2, 2, 100) == pytest.approx(0.073 + 32e-5 + 0.009 + 0.004 + 96e-5 - rest)


@pytest.mark.parametrize(
    ("latency", "transfer", "blocks", "pays"),
    [
        (0.005, 0.002, 1, True),  # 7 ms for 16
        (0.015, 0.002, 1, False),  # 17 ms for 16
        (0.015, 0.002, 2, True),  # 19 ms for 32
        (0.005, 0.020, 1, False),
        (0.005, 0.020, 40, False),
        (0.200, 0.002, 8, False),
        (0.200, 0.002, 40, True),
    ],
)
def test_the_quicker_way(latency: float, transfer: float, blocks: int, pays: bool) -> None:
    """Where loading as a whole takes less than the rows it saves; a long lookup wants a long text."""
    chosen, _ = choice(latency, transfer)
    assert chosen.pays(0, blocks, blocks * SIZE + 1) == pays


def test_break_even() -> None:
    """The shortest text that is loaded, in whole blocks; none where a block takes longer than its rows."""
    assert choice()[0].break_even_tokens == SIZE
    assert choice(latency=0.040)[0].break_even_tokens == 3 * SIZE
    assert choice(transfer=0.05)[0].break_even_tokens is None
    assert choice(from_tokens=100)[0].break_even_tokens == 100
    assert choice(step_time=lambda: None)[0].break_even_tokens is None


def test_nobody_waits_longer_than_computing_takes() -> None:
    """The wait ends where the rows would be there, or where the configuration says."""
    chosen, _ = choice(wait_seconds=0.1)
    assert chosen.patience(0, 1, 17) == pytest.approx(0.016 - 16e-5)  # what is cached costs, too
    assert chosen.patience(0, 40, 641) == 0.1
    assert choice(wait_seconds=0.1, from_tokens=1)[0].patience(0, 1, 17) == 0.1


def test_a_given_length_decides_alone() -> None:
    """kv_load_tokens: whatever saves so many rows, however long it takes."""
    chosen, _ = choice(latency=10.0, from_tokens=48)
    assert [chosen.wants(0, blocks, 200) for blocks in (0, 1, 2, 3, 9)] == [False, False, False, True, True]


def test_what_is_not_known_is_tried() -> None:
    """Without a step-time model, or before anything was loaded, the first load teaches."""
    assert choice(step_time=lambda: None)[0].pays(0, 1, 17)
    blank = Choice(LoadTimes(), lambda: MODEL, block_size=SIZE, step_tokens=STEP, wait_seconds=1.0)
    assert blank.pays(0, 1, 17)
    assert not blank.pays(0, 0, 17)
    assert blank.times.seconds(1) is None


def test_a_slow_time_does_not_last_for_ever() -> None:
    """Loads that became dear stop; half a minute later one is tried again, one only, and what it shows decides."""
    chosen, clock = choice()
    for _ in range(20):
        chosen.times.loaded(1, 0.5)
    assert not chosen.wants(0, 8, 129)
    clock.now += 31
    assert not chosen.wants(0, 0, 17)
    assert chosen.wants(0, 8, 129)
    assert not chosen.wants(0, 8, 129)
    clock.now += 31
    assert chosen.wants(0, 8, 129)
    for _ in range(40):
        chosen.times.loaded(1, 0.002)
    assert chosen.wants(0, 8, 129)
    chosen.times.placed(1, 0.5)  # the pool is slow to take them
    assert not chosen.wants(0, 8, 129)
    clock.now += 31
    assert not choice(from_tokens=1000)[0].wants(0, 8, 129)
