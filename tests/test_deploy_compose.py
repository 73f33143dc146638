"""The compose stack run for real, wherever a Docker engine answers: up, generate, scale, kill, down."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import socket
import subprocess
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field

import pytest
import yaml

from graftree import Client, LocalStack
from graftree.errors import GraftreeError
from graftree.sdk.results import PodInfo
from tests.deploy_manifests import CONFIGS, ROOT
from tests.test_deploy_compose_file import SERVICES, filled

pytestmark = pytest.mark.timeout(3600)

MODEL = "random:llama?layers=1&hidden=32&context=1024"
PROMPT = "The weather in Paris is nice, the weather in Paris"
NEW_TOKENS = 600
ROUTER_BYTES = 300e6
NEEDED = ("python:3.11-slim-bookworm", filled(SERVICES["redis-state"]["image"]))
PROFILED = tuple(name for name, service in SERVICES.items() if "profiles" in service)


def run(*command: str, check: bool = True) -> str:
    """stdout of a command. Fails with its stderr."""
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0 or not check, f"{' '.join(command)}: {done.stderr[-2000:]}"
    return done.stdout if done.returncode == 0 else ""


def compose_command() -> list[str]:
    """`docker compose` or `docker-compose`; skips where the stack cannot be built in minutes, and says why."""
    if shutil.which("docker") is None or not run("docker", "version", "--format", "{{.Server.Version}}", check=False):
        pytest.skip("no Docker engine answers here: the compose stack was not run")
    if not any((ROOT / "deploy" / "docker" / "wheels" / "cpu").glob("torch-*.whl")):
        pytest.skip(
            "no CPU wheel of torch in deploy/docker/wheels/cpu: building would fetch gigabytes; nothing was run"
        )
    for image in NEEDED:
        known = run("docker", "image", "inspect", image, check=False)
        if not known and not run("docker", "pull", "-q", image, check=False):
            pytest.skip(f"{image} is not here and cannot be pulled: the compose stack was not run")
    if run("docker", "compose", "version", check=False):
        return ["docker", "compose"]
    if shutil.which("docker-compose") is None:
        pytest.skip("neither docker compose nor docker-compose is here: the compose stack was not run")
    return ["docker-compose"]


@dataclass
class Stack:
    """A compose project of its own, so that it meets no other on this machine."""

    command: list[str]
    port: int
    name: str = "graftree-test"
    environ: dict[str, str] = field(default_factory=dict)

    def compose(self, *arguments: str) -> str:
        """Run a compose command on the project."""
        command = [*self.command, "-p", self.name, "-f", str(ROOT / "docker-compose.yml"), *arguments]
        done = subprocess.run(
            command, cwd=ROOT, capture_output=True, text=True, check=False, env={**os.environ, **self.environ}
        )
        assert done.returncode == 0, f"{' '.join(arguments)}: {done.stdout[-2000:]}{done.stderr[-2000:]}"
        return done.stdout

    def containers(self, service: str) -> list[str]:
        """Ids of a service's running containers."""
        labels = (f"com.docker.compose.project={self.name}", f"com.docker.compose.service={service}")
        return run("docker", "ps", "-q", *(f"--filter=label={label}" for label in labels)).split()

    def pods(self, tier: str) -> list[PodInfo]:
        """The pods of a tier that the router uses."""
        with Client(f"127.0.0.1:{self.port}") as client:
            return [pod for pod in client.model_info(timeout=5).pods if (pod.tier, pod.state) == (tier, "ready")]

    def await_pods(self, tier: str, count: int) -> None:
        """Wait until the router uses so many pods of a tier."""
        deadline, found = time.monotonic() + 300, -1
        while found != count:
            assert time.monotonic() < deadline, f"{found} of {count} {tier}s: {self.compose('logs', '--tail=20')}"
            time.sleep(1)
            with contextlib.suppress(GraftreeError):
                found = len(self.pods(tier))

    def generate(self, kill: str = "") -> tuple[int, ...]:
        """Token ids of one answer. Once tokens come, the container of tier `kill` that serves it is killed."""
        tokens: list[int] = []
        with Client(f"127.0.0.1:{self.port}") as client:
            for chunk in client.stream(PROMPT, max_new_tokens=NEW_TOKENS, ignore_eos=True, timeout=240):
                if kill and not tokens:
                    (serving,) = (pod for pod in self.pods(kill) if pod.sessions)
                    run("docker", "kill", serving.address.partition(":")[0])
                tokens += chunk.token_ids
        return tuple(tokens)


@pytest.fixture(scope="module")
def stack() -> Iterator[Stack]:
    """One stack for all tests of this file, in their order; taken down at the end whatever happened."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    stack = Stack(compose_command(), port)
    stack.environ = {
        "GRAFTREE_PORT": str(port),
        "GRAFTREE_MODEL": MODEL,
        "VERIFIER_CPUS": "1",
        "VERIFIER_THREADS": "1",
    }
    try:
        stack.compose("build")
        stack.compose("up", "-d")
        stack.await_pods("speculator", 1)
        yield stack
    finally:
        stack.compose("down", "-v", "--timeout", "5")


@pytest.fixture(scope="module")
def expected() -> tuple[int, ...]:
    """The same answer from a stack without containers and without speculators."""
    with LocalStack(MODEL, [], in_process=True) as local, Client(local.target) as client:
        return client.generate(PROMPT, max_new_tokens=NEW_TOKENS, ignore_eos=True).token_ids


def test_generate(stack: Stack, expected: tuple[int, ...]) -> None:
    """The stack comes up by itself, model included, and says what plain decoding says."""
    assert stack.generate() == expected


def test_containers_are_confined(stack: Stack) -> None:
    """As run, not as written: no root, no capability, a read-only file system; the router is small, without torch."""
    for tier in CONFIGS:
        (container,) = stack.containers(tier)
        status = run("docker", "exec", container, "cat", "/proc/1/status")
        assert "CapEff:\t0000000000000000" in status
        assert "Uid:\t10001" in status
        for path in ("/opt/x", "/models/x"):
            assert not run("docker", "exec", container, "sh", "-c", f"touch {path} && echo written", check=False)
    image = json.loads(run("docker", "image", "inspect", filled(SERVICES["router"]["image"])))[0]
    assert image["Size"] < ROUTER_BYTES
    (router,) = stack.containers("router")
    assert not run("docker", "exec", router, "python", "-c", "import torch; print(1)", check=False)


def test_metrics(stack: Stack) -> None:
    """What prometheus.yml names is there: each tier's metrics, under its service's name, on the inner network."""
    (router,) = stack.containers("router")
    for tier in CONFIGS:
        script = (
            f"import urllib.request as u; print(u.urlopen('http://{tier}:9100/metrics', timeout=60).read().decode())"
        )
        metrics = run("docker", "exec", router, "python", "-c", script)
        assert "graftree_pod_ready 1.0" in metrics


def test_scale(stack: Stack, expected: tuple[int, ...]) -> None:
    """More speculators and verifiers are found and used without a restart of anything."""
    router = stack.containers("router")
    stack.compose("up", "-d", "--no-recreate", "--scale", "speculator=3", "--scale", "verifier=2")
    stack.await_pods("speculator", 3)
    stack.await_pods("verifier", 2)
    assert stack.containers("router") == router
    assert stack.generate() == expected


@pytest.mark.parametrize("tier", ["speculator", "verifier"])
def test_kill(stack: Stack, expected: tuple[int, ...], tier: str) -> None:
    """A pod killed while an answer streams changes no token of it."""
    before = len(stack.containers(tier))
    assert stack.generate(kill=tier) == expected
    assert len(stack.containers(tier)) == before - 1


def test_redis_restart(stack: Stack, expected: tuple[int, ...]) -> None:
    """The state Redis restarts with its file; requests before, during and after are answered."""
    stack.compose("restart", "--timeout", "5", "redis-state")
    assert stack.generate() == expected
    stack.await_pods("speculator", 2)
    stack.await_pods("verifier", 1)


def test_down(stack: Stack) -> None:
    """All pods end by themselves within their grace; only those that were killed before did not."""
    stack.compose("stop")
    listed = run("docker", "ps", "-aq", f"--filter=label=com.docker.compose.project={stack.name}").split()
    ends: Counter[tuple[str, int]] = Counter()
    for container in json.loads(run("docker", "inspect", *listed)):
        ends[container["Config"]["Labels"]["com.docker.compose.service"], container["State"]["ExitCode"]] += 1
    assert {end: count for end, count in ends.items() if end[0] in CONFIGS} == {
        ("router", 0): 1,
        ("speculator", 0): 2,
        ("speculator", 137): 1,
        ("verifier", 0): 1,
        ("verifier", 137): 1,
    }
    assert not {service for service, _ in ends} & set(PROFILED)


def test_compose_reads_the_files(stack: Stack) -> None:
    """The compose in use accepts both files, profiles and the GPU override included."""
    files = ("-f", str(ROOT / "docker-compose.gpu.yml"))
    shown = yaml.safe_load(stack.compose(*files, "--profile", "observability", "config"))
    assert {"prometheus", "grafana", *SERVICES} == set(shown["services"])
