"""`LocalPod`: one pod of a `LocalStack`, whichever way it runs."""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from typing import Any, Literal

from graftree import config as configuration
from graftree.config import PodConfig, RouterConfig, SpeculatorConfig, VerifierConfig
from graftree.errors import GraftreeError

Tier = Literal["router", "verifier", "speculator"]

MODULES: dict[Tier, str] = {
    "router": "router",
    "verifier": "verifier_service",
    "speculator": "speculator_service",
}
CONFIGS: dict[Tier, type[PodConfig]] = {
    "router": RouterConfig,
    "verifier": VerifierConfig,
    "speculator": SpeculatorConfig,
}


class LocalPod(ABC):
    """One pod. `start` returns at once; `wait` until it is ready; then one of `stop` and `kill`.

    Args:
        tier: which tier it belongs to.
        index: its place among all that the stack ever started in that tier.
        values: fields of its tier's configuration; `pod_id` is among them.
        on_exit: called, from any thread, with the pod and a reason when it ends without having been asked to.

    Raises:
        ConfigError: `values` are no configuration of the tier.

    Attributes:
        address: HOST:PORT once ready.
    """

    def __init__(
        self, tier: Tier, index: int, values: Mapping[str, Any], on_exit: Callable[[LocalPod, str], None]
    ) -> None:
        self.tier, self.index, self.values = tier, index, dict(values)
        self.config = configuration.build(CONFIGS[tier], self.values)
        self.address = ""
        self._on_exit = on_exit
        self._settled = threading.Event()  # ready, or ended
        self._failure: GraftreeError | None = None
        self._asked = False  # whether its end was asked for

    def __repr__(self) -> str:
        return f"<{self.name} {self.address or 'starting'}{'' if self.alive else ' ended'}>"

    @property
    def name(self) -> str:
        """For people: tier and index."""
        return f"{self.tier} {self.index}"

    @property
    def pod_id(self) -> str:
        """Its id in the registry."""
        return self.config.pod_id

    @property
    @abstractmethod
    def alive(self) -> bool:
        """Whether it runs."""

    @abstractmethod
    def start(self) -> None:
        """Begin to start."""

    @abstractmethod
    def stop(self, drain_seconds: float | None = None) -> None:
        """End in good order as on SIGTERM, and wait for it; None = the configured drain time."""

    @abstractmethod
    def kill(self) -> None:
        """End at once, as on SIGKILL, and wait for it."""

    @property
    def settled(self) -> bool:
        """Whether it is ready, or has ended."""
        return self._settled.is_set()

    def tail(self) -> str:
        """The end of its log, where it has one."""
        return ""

    def wait(self) -> str:
        """Wait until the pod is ready.

        Returns:
            Its address.

        Raises:
            GraftreeError: why it could not start.
        """
        self._settled.wait()
        if self._failure is not None:
            raise self._failure
        return self.address

    def _became_ready(self, address: str) -> None:
        self.address = address
        self._settled.set()

    def _ended(self, failure: GraftreeError) -> None:
        started = self._settled.is_set()
        self._failure = self._failure or failure
        self._settled.set()
        if started and not self._asked:
            self._on_exit(self, str(failure))
