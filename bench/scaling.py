"""`Scaler`: the arithmetic of Kubernetes' HorizontalPodAutoscaler (autoscaling/v2) behind a KEDA ScaledObject.

The numbers come from the manifest that is deployed, so that what is simulated is what runs. After the algorithm as
Kubernetes documents it ("Horizontal Pod Autoscaling": algorithm details, configurable scaling behavior) and KEDA's
page on ScaledObjects (AverageValue metrics, fallback).
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import yaml

TOLERANCE = 0.1  # no change while demand and target differ by less; the controller's default

Direction = Literal["up", "down"]


@dataclass(frozen=True)
class Policy:
    """At most this change in this time.

    Attributes:
        kind: Pods, or Percent of what there was at the period's start.
    """

    kind: str
    value: int
    seconds: float


@dataclass(frozen=True)
class Rules:
    """One direction of `behavior`.

    Attributes:
        window: seconds whose most careful recommendation counts.
        policies: the one that allows the most change decides.
    """

    window: float
    policies: tuple[Policy, ...]

    @classmethod
    def parse(cls, raw: Mapping[str, Any]) -> Rules:
        """`scaleUp` or `scaleDown` of a manifest. Raises: ValueError for a selectPolicy other than Max."""
        if raw.get("selectPolicy", "Max") != "Max":
            raise ValueError(f"selectPolicy {raw['selectPolicy']} is not simulated")
        policies = (Policy(entry["type"], entry["value"], entry["periodSeconds"]) for entry in raw["policies"])
        return cls(raw["stabilizationWindowSeconds"], tuple(policies))

    def faster(self, factor: float) -> Rules:
        """The same in a time that runs `factor` times as fast."""
        policies = tuple(replace(policy, seconds=policy.seconds / factor) for policy in self.policies)
        return Rules(self.window / factor, policies)


@dataclass(frozen=True)
class ScalerConfig:
    """A ScaledObject of one Prometheus trigger.

    Attributes:
        threshold: of the metric, per pod.
        poll: seconds between two looks at it.
        failures: looks without an answer before the fallback holds.
        fallback: pods then.
    """

    least: int
    most: int
    threshold: float
    poll: float
    failures: int
    fallback: int
    up: Rules
    down: Rules

    @classmethod
    def read(cls, path: Path) -> ScalerConfig:
        """The ScaledObject of a file."""
        spec = yaml.safe_load(path.read_text())["spec"]
        (trigger,) = spec["triggers"]
        if trigger["metricType"] != "AverageValue":
            raise ValueError(f"metricType {trigger['metricType']} is not simulated")
        behavior = spec["advanced"]["horizontalPodAutoscalerConfig"]["behavior"]
        return cls(
            least=spec["minReplicaCount"],
            most=spec["maxReplicaCount"],
            threshold=float(trigger["metadata"]["threshold"]),
            poll=spec["pollingInterval"],
            failures=spec["fallback"]["failureThreshold"],
            fallback=spec["fallback"]["replicas"],
            up=Rules.parse(behavior["scaleUp"]),
            down=Rules.parse(behavior["scaleDown"]),
        )

    def faster(self, factor: float) -> ScalerConfig:
        """The same in a time that runs `factor` times as fast."""
        return replace(self, poll=self.poll / factor, up=self.up.faster(factor), down=self.down.faster(factor))


class Scaler:
    """Decides how many pods there should be.

    Args:
        config: in the seconds of the clock that `decide` is told.
        replicas: how many there are at first.
    """

    def __init__(self, config: ScalerConfig, replicas: int) -> None:
        self.config, self.replicas = config, replicas
        self._recommended: deque[tuple[float, int]] = deque()
        self._changes: deque[tuple[float, int]] = deque()
        self._failures = 0

    def decide(self, now: float, demand: float | None) -> int:
        """One look: `demand` is the metric's total over all pods, None where it could not be had.

        Returns:
            The number of pods from now on.
        """
        wanted = self._recommend(demand)
        if wanted is None:
            return self.replicas
        self._recommended.append((now, wanted))
        keep = max(self.config.up.window, self.config.down.window)
        while self._recommended[0][0] < now - keep:
            self._recommended.popleft()
        stable = self._stabilize(now)
        if stable > self.replicas:
            stable = min(stable, max(self.replicas, self._limit(now, "up")))
        elif stable < self.replicas:
            stable = max(stable, min(self.replicas, self._limit(now, "down")))
        if stable != self.replicas:
            self._changes.append((now, stable - self.replicas))
            self.replicas = stable
        return self.replicas

    def _recommend(self, demand: float | None) -> int | None:
        config = self.config
        if demand is None:
            self._failures += 1
            if self._failures < config.failures:
                return None
            demand = config.threshold * config.fallback
        else:
            self._failures = 0
        ratio = demand / (config.threshold * self.replicas)
        near = abs(ratio - 1) <= TOLERANCE
        wanted = self.replicas if near else math.ceil(demand / config.threshold - 1e-9)
        return min(max(wanted, config.least), config.most)

    def _stabilize(self, now: float) -> int:
        """Up only if all recommendations of the up window say so, down only if all of the down window do."""
        lowest = min(count for at, count in self._recommended if at >= now - self.config.up.window)
        highest = max(count for at, count in self._recommended if at >= now - self.config.down.window)
        return min(max(self.replicas, lowest), highest)

    def _limit(self, now: float, direction: Direction) -> int:
        sign = 1 if direction == "up" else -1
        limits = []
        for policy in (self.config.up if direction == "up" else self.config.down).policies:
            recent = [change for at, change in self._changes if at > now - policy.seconds]
            before = self.replicas - sum(recent)
            if policy.kind == "Pods":
                limits.append(before + sign * policy.value)
            elif sign > 0:
                limits.append(math.ceil(before * (1 + policy.value / 100)))
            else:
                limits.append(int(before * (1 - policy.value / 100)))
        return max(limits) if sign > 0 else min(limits)
