"""Malformed bytes and random protobufs against every port: no crash, no leak, others unharmed."""

from __future__ import annotations

import asyncio
import time
import urllib.request
from pathlib import Path
from typing import Any

from graftree import Client, LocalStack
from tests.fuzz import Tally, fuzz

MODEL = "random:llama?layers=1&seed=3"
OPTIONS: dict[str, Any] = {"metrics_listen": "127.0.0.1:0"}
REQUEST: dict[str, Any] = {"prompt": "once upon a time", "max_new_tokens": 24, "temperature": 0.7, "seed": 5}


def metrics(address: str) -> dict[str, float]:
    with urllib.request.urlopen(f"http://{address}/metrics", timeout=20) as answer:
        lines = answer.read().decode().splitlines()
    rows = [line.rpartition(" ") for line in lines if line and not line.startswith("#")]
    return {name: float(value) for name, _, value in rows}


def descriptors() -> int:
    return len(list(Path("/proc/self/fd").iterdir()))


def run(seconds: float, seed: int) -> Tally:
    """The stack answers the same before, during and after, and what it holds goes back to where it was."""
    with LocalStack(
        MODEL,
        ["ngram", f"model:{MODEL}"],
        in_process=True,
        threads=1,
        router_options=OPTIONS,
        verifier_options=OPTIONS,
        speculator_options=OPTIONS,
    ) as stack:
        pods: list[Any] = [pod for tier in ("router", "verifier", "speculator") for pod in stack.pods(tier)]  # type: ignore[arg-type]
        endpoints = [pod.instance.metrics_address for pod in pods]
        with Client(stack.target) as client:
            expected = client.generate(**REQUEST)
            before = descriptors()

            async def both() -> tuple[Tally, list[Any]]:
                attack = asyncio.create_task(
                    fuzz([pod.address for pod in pods], endpoints, seconds=seconds, seed=seed)
                )
                answers = []
                while not attack.done():
                    answers.append(await asyncio.to_thread(client.generate, **REQUEST))
                return await attack, answers

            tally, answers = asyncio.run(both())
            answers.append(client.generate(**REQUEST))
            assert all(answer.token_ids == expected.token_ids for answer in answers)
            deadline = time.monotonic() + 30
            while any(pod.instance.record().sessions for pod in pods):
                assert time.monotonic() < deadline, [pod.instance.record() for pod in pods]
                time.sleep(0.05)
            assert {pod.state for pod in client.model_info().pods} == {"ready"}
            verifier = metrics(pods[1].instance.metrics_address)
            assert verifier["graftree_verifier_pool_faults_total"] == 0
            assert verifier["graftree_verifier_sessions_ready"] == 0
            while descriptors() > before + 8:
                assert time.monotonic() < deadline, (before, descriptors())
                time.sleep(0.05)
        assert all(pod.alive for pod in pods)
    return tally


def test_nonsense_on_every_port() -> None:
    """Two seconds of it; `python -m tests.fuzz --seconds 60` is the long run."""
    tally = run(seconds=2.0, seed=1)
    assert sum(tally.counts.values()) > 20
