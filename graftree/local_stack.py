"""`LocalStack`: all of Graftree on this machine, for users, tests and demonstrations.

with LocalStack(model="random:llama?seed=0", speculators=["ngram"]) as stack, Client(stack.target) as client:
    client.generate("Once upon", max_new_tokens=32)
    stack.kill("speculator", 0)
    stack.add("speculator", "ngram")
"""

from __future__ import annotations

import contextlib
import threading
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Self, get_args

from graftree.client import Client
from graftree.config import DEFAULT_MODEL
from graftree.cores import threads_for
from graftree.errors import Incompatible, InvalidArgument, NotFound, Unavailable
from graftree.local.folder import Folder
from graftree.local.instances import InstancePod, LoopThread
from graftree.local.pod import LocalPod, Tier
from graftree.local.processes import ProcessPod, Spawner
from graftree.models.pull import pull
from graftree.models.uri import ModelUri
from graftree.store.connection import check
from graftree.store.embedded import EmbeddedRedis

Speculator = str | Mapping[str, Any]

_POLL_SECONDS = 0.02


class LocalStack:
    """Redis, verifiers, speculators and routers, started together and ended together.

    Args:
        model: the LLM, as VerifierConfig.model.
        speculators: one entry a pod: a drafter ("ngram", "model:<uri>", "package.module:Class"), or a mapping of
            SpeculatorConfig fields.
        verifiers, routers: how many of each.
        redis: URL of a Redis to use; None = an embedded one.
        port: the first router's; 0 = any free one.
        in_process: run the tiers on a thread of this process, not as child processes: quick to start, for tests.
        threads: CPU threads of each pod with a model; None = the machine's cores but one, shared out evenly among
            verifiers and speculators with a model (child processes; on a thread of this process torch's choice).
        environ: further variables for child processes.
        router_options, verifier_options, speculator_options: further configuration fields of every pod of a tier.
        start_seconds: longest wait for a pod to become ready, and then for router and pods to find each other.
        log_directory: where child processes log, one file each; None = a temporary folder that goes with the stack.
        client_options: keywords of the `Client` that the stack itself looks at its routers with (`credentials`,
            `api_key` of an admin), where their configuration asks for such.
        notify: called, from any thread, with a line for people: what starts, what ended unexpectedly.

    Raises (from `start`, `add` and `with`):
        ConfigError: a configuration field that does not exist or does not fit.
        InvalidArgument: a model or drafter that cannot be.
        Incompatible: a speculator whose vocabulary is not the model's, with the reason.
        Unavailable: a pod that did not start, with the end of its log.
    """

    def __init__(
        self,
        model: str = DEFAULT_MODEL,
        speculators: Sequence[Speculator] = ("ngram",),
        *,
        verifiers: int = 1,
        routers: int = 1,
        redis: str | None = None,
        port: int = 0,
        in_process: bool = False,
        threads: int | None = None,
        environ: Mapping[str, str] | None = None,
        router_options: Mapping[str, Any] | None = None,
        verifier_options: Mapping[str, Any] | None = None,
        speculator_options: Mapping[str, Any] | None = None,
        start_seconds: float = 300.0,
        log_directory: str | Path | None = None,
        client_options: Mapping[str, Any] | None = None,
        notify: Callable[[str], None] | None = None,
    ) -> None:
        for name, count in (("verifiers", verifiers), ("routers", routers)):
            if count < 1:
                raise InvalidArgument(name, count, "at least 1")
        if isinstance(speculators, str):
            raise InvalidArgument("speculators", speculators, "a list of drafters")
        self.model = str(ModelUri.parse(model))
        self._speculators = tuple(speculators)
        self._counts = {"verifier": verifiers, "router": routers}
        self._redis_url, self._port, self._in_process = redis, port, in_process
        if threads is None and not in_process:
            threads = threads_for(verifiers + sum(map(_has_model, self._speculators)))
        engine = {} if threads is None else {"threads": threads}
        self._options: dict[Tier, dict[str, Any]] = {
            "router": dict(router_options or {}),
            "verifier": engine | dict(verifier_options or {}),
            "speculator": engine | dict(speculator_options or {}),
        }
        self._environ = dict(environ or {})
        self._client_options = dict(client_options or {})
        self._start_seconds = start_seconds
        self._log_directory = Path(log_directory) if log_directory else None
        self._notify = notify or (lambda line: None)
        self._name = uuid.uuid4().hex[:6]
        self._pods: dict[Tier, list[LocalPod]] = {tier: [] for tier in get_args(Tier)}
        self._lock = threading.Lock()
        self._open = contextlib.ExitStack()

    # Life of the whole.

    def start(self) -> Self:
        """Start everything and wait until every pod is linked to every router. What has started ends on failure."""
        try:
            self._pull_models()
            self._start_base()
            for _ in range(self._counts["verifier"]):
                self._launch("verifier", {"model": self.model})
            for drafter in self._speculators:
                self._launch("speculator", _speculator(drafter))
            for index in range(self._counts["router"]):
                self._launch("router", {"model": self.model} | ({"port": self._port} if index == 0 else {}))
            self._await_ready([pod for pods in self._pods.values() for pod in pods])
            self._await_links()
        except BaseException:
            self.close(drain_seconds=0)
            raise
        return self

    def _pull_models(self) -> None:
        wanted = {self.model}
        for drafter in map(_speculator, self._speculators):
            kind, _, uri = str(drafter.get("drafter", "")).partition(":")
            if kind == "model":
                wanted.add(uri)
        for uri in sorted(wanted):
            if ModelUri.parse(uri).kind not in ("random", "standin", "directory"):
                self._notify(f"model {uri}")
                pull(uri)

    def _start_base(self) -> None:
        if self._log_directory is None:
            self._log_directory = self._open.enter_context(Folder()).path
        self._log_directory.mkdir(parents=True, exist_ok=True)
        self._spawner = Spawner()
        self._open.callback(self._spawner.close)
        if self._in_process:
            self._loop = LoopThread()
            self._open.callback(self._loop.close)
        if self._redis_url is None:
            embedded = EmbeddedRedis()
            self._redis_url = self._spawner.run(embedded.__enter__).url
            self._open.callback(embedded.__exit__, None, None, None)
        else:
            check(self._redis_url)

    def close(self, drain_seconds: float | None = None) -> None:
        """End everything: the routers, then all other pods, then Redis. Closing twice is fine.

        Args:
            drain_seconds: longest wait for running requests; None = as configured.
        """
        order: tuple[tuple[Tier, ...], ...] = (("router",), ("speculator", "verifier"))
        for tiers in order:
            running = [pod for tier in tiers for pod in self._pods[tier] if pod.alive]
            enders = [threading.Thread(target=pod.stop, args=(drain_seconds,)) for pod in running]
            for ender in enders:
                ender.start()
            for ender in enders:
                ender.join()
        self._open.close()

    def __enter__(self) -> Self:
        return self.start()

    def __exit__(self, *_: object) -> None:
        self.close()

    # What is there.

    @property
    def target(self) -> str:
        """HOST:PORT of the first router that runs."""
        return self.targets[0]

    @property
    def targets(self) -> tuple[str, ...]:
        """HOST:PORT of every router that runs. Raises: Unavailable where none does."""
        addresses = tuple(pod.address for pod in self._pods["router"] if pod.alive and pod.address)
        if not addresses:
            raise Unavailable("no router runs")
        return addresses

    @property
    def redis(self) -> str:
        """URL of the Redis in use."""
        if self._redis_url is None:
            raise Unavailable("the stack has not been started")
        return self._redis_url

    def pods(self, tier: Tier) -> tuple[LocalPod, ...]:
        """Every pod ever started in a tier, dead ones included: the place in this tuple is its index."""
        return tuple(self._pods[tier])

    # What a test does to it.

    def kill(self, tier: Tier, index: int) -> None:
        """End one pod at once, as SIGKILL does."""
        self._pod(tier, index).kill()

    def stop(self, tier: Tier, index: int, drain_seconds: float | None = None) -> None:
        """End one pod in good order, as SIGTERM does."""
        self._pod(tier, index).stop(drain_seconds)

    def pause(self, tier: Tier, index: int) -> None:
        """Freeze one pod (SIGSTOP): its connections stay open and nothing answers. Child processes only."""
        self._process(tier, index).pause()

    def resume(self, tier: Tier, index: int) -> None:
        """Let a frozen pod go on."""
        self._process(tier, index).resume()

    def add(self, tier: Tier, spec: Speculator | None = None, **options: Any) -> int:
        """Start one more pod and wait until it is linked.

        Args:
            tier: of the new pod.
            spec: its drafter, for a speculator.
            options: further fields of its configuration.

        Returns:
            Its index.
        """
        if tier == "speculator":
            values = _speculator("ngram" if spec is None else spec)
        elif spec is None:
            values = {"model": self.model}
        else:
            raise InvalidArgument("spec", spec, "only a speculator has one")
        pod = self._launch(tier, values | options)
        self._await_ready([pod])
        self._await_links()
        return pod.index

    def _pod(self, tier: Tier, index: int) -> LocalPod:
        try:
            return self._pods[tier][index]
        except (KeyError, IndexError):
            raise NotFound(f"no {tier} {index} in this stack") from None

    def _process(self, tier: Tier, index: int) -> ProcessPod:
        pod = self._pod(tier, index)
        if not isinstance(pod, ProcessPod):
            raise InvalidArgument("in_process", True, "only a child process can be paused")
        return pod

    # Starting.

    def _launch(self, tier: Tier, values: Mapping[str, Any]) -> LocalPod:
        with self._lock:
            index = len(self._pods[tier])
            everything = {
                "redis": self.redis,
                "pod_id": f"{tier}-{index}-{self._name}",
                **self._options[tier],
                **values,
            }
            pod: LocalPod
            if self._in_process:
                pod = InstancePod(tier, index, everything, self._report, loop=self._loop)
            else:
                assert self._log_directory is not None
                log = self._log_directory / f"{tier}-{index}.log"
                pod = ProcessPod(
                    tier, index, everything, self._report, spawner=self._spawner, log=log, environ=self._environ
                )
            self._pods[tier].append(pod)
        pod.start()
        return pod

    def _report(self, pod: LocalPod, reason: str) -> None:
        self._notify(reason if reason.startswith(pod.name) else f"{pod.name} ended: {reason}")

    def _await_ready(self, pods: Sequence[LocalPod]) -> None:
        """Wait for all at once: the first that fails is the error, whichever it is."""
        end = time.monotonic() + self._start_seconds
        waiting = list(pods)
        while waiting:
            for pod in [pod for pod in waiting if pod.settled]:
                self._notify(f"{pod.name} is ready at {pod.wait()}")
                waiting.remove(pod)
            if waiting and time.monotonic() > end:
                names = ", ".join(pod.name for pod in waiting)
                raise Unavailable(f"not ready after {self._start_seconds:g} s: {names}{_tails(waiting)}")
            time.sleep(_POLL_SECONDS)

    def _await_links(self) -> None:
        """Wait until each running router is linked to each running verifier and speculator."""
        end = time.monotonic() + self._start_seconds
        wanted = [pod for tier in ("verifier", "speculator") for pod in self._pods[tier] if pod.alive]
        for target in self.targets:
            with Client(target, **self._client_options) as client:
                while missing := _not_linked(client, wanted):
                    if time.monotonic() > end:
                        raise Unavailable(f"after {self._start_seconds:g} s the router has no link to {missing}")
                    time.sleep(_POLL_SECONDS)


def _tails(pods: Sequence[LocalPod]) -> str:
    tails = [f"\n{pod.name}'s log ends with:\n{tail}" for pod in pods if (tail := pod.tail())]
    return "".join(tails)


def _not_linked(client: Client, pods: Sequence[LocalPod]) -> str:
    states = {info.pod_id: info.state for info in client.model_info(timeout=10.0).pods}
    missing = []
    for pod in pods:
        state = states.get(pod.pod_id, "unknown")
        if state.startswith("refused"):
            raise Incompatible(f"{pod.name} was {state}")
        if state != "ready" and pod.alive:
            missing.append(f"{pod.name} ({state})")
    return ", ".join(missing)


def _has_model(drafter: Speculator) -> bool:
    return str(_speculator(drafter).get("drafter", "")).startswith("model:")


def _speculator(drafter: Speculator) -> dict[str, Any]:
    return {"drafter": drafter} if isinstance(drafter, str) else dict(drafter)
