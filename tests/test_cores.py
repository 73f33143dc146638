"""How many threads a pod takes when nobody says."""

from __future__ import annotations

from pathlib import Path

import pytest

from graftree.cores import threads_for, usable_cores


@pytest.fixture
def two_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.sched_getaffinity", lambda pid: {3, 5}, raising=False)


@pytest.mark.parametrize(
    ("limit", "cores"),
    [("max 100000", 2), ("150000 100000", 2), ("100000 100000", 1), ("20000 100000", 1), ("900000 100000", 2)],
)
@pytest.mark.usefixtures("two_cores")
def test_a_quota_counts_where_it_is_less_than_the_cores(tmp_path: Path, limit: str, cores: int) -> None:
    """A container's CPU limit, rounded up, bounds the threads; a larger one or none does not."""
    (tmp_path / "cpu.max").write_text(f"{limit}\n")
    assert usable_cores(tmp_path) == cores


@pytest.mark.parametrize("digits", [25, 400, 5000])
@pytest.mark.usefixtures("two_cores")
def test_a_quota_beyond_all_numbers_is_no_limit(tmp_path: Path, digits: int) -> None:
    """More digits than a float or a conversion takes leave all the cores."""
    (tmp_path / "cpu.max").write_text(f"{'9' * digits} 100000\n")
    assert usable_cores(tmp_path) == 2


@pytest.mark.parametrize(("quota", "cores"), [("-1", 2), ("50000", 1), ("nonsense", 2)])
@pytest.mark.usefixtures("two_cores")
def test_the_older_control_groups_are_read_too(tmp_path: Path, quota: str, cores: int) -> None:
    """Version 1 keeps quota and period in two files; what cannot be read is no limit."""
    (tmp_path / "cpu").mkdir()
    (tmp_path / "cpu" / "cpu.cfs_quota_us").write_text(f"{quota}\n")
    (tmp_path / "cpu" / "cpu.cfs_period_us").write_text("100000\n")
    assert usable_cores(tmp_path) == cores


@pytest.mark.usefixtures("two_cores")
def test_without_control_groups_the_scheduler_decides(tmp_path: Path) -> None:
    """A machine without the files has the cores that the process may run on."""
    assert usable_cores(tmp_path / "absent") == 2


@pytest.mark.parametrize(
    ("cores", "pods", "threads"), [(1, 1, 1), (2, 1, 1), (2, 2, 1), (8, 1, 7), (8, 2, 3), (4, 9, 1), (4, 0, 3)]
)
def test_pods_share_what_one_core_leaves(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, cores: int, pods: int, threads: int
) -> None:
    """An even share of all cores but one, at least one thread each."""
    monkeypatch.setattr("os.sched_getaffinity", lambda pid: set(range(cores)), raising=False)
    assert threads_for(pods, tmp_path) == threads
