"""Manifests as a cluster would see them: overlays built by kubectl, environments resolved, policies evaluated."""

from __future__ import annotations

import functools
import re
import subprocess
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from graftree.config import PodConfig, RouterConfig, SpeculatorConfig, VerifierConfig

ROOT = Path(__file__).parent.parent
KUSTOMIZE = ROOT / "deploy" / "kustomize"
OVERLAYS = ("minimal", "gpu", "hpa", "keda")
CONFIGS: dict[str, type[PodConfig]] = {
    "router": RouterConfig,
    "verifier": VerifierConfig,
    "speculator": SpeculatorConfig,
}
COMPONENT = "app.kubernetes.io/component"

Resource = dict[str, Any]


def build(folder: Path) -> str:
    """What `kubectl kustomize` makes of a folder, as YAML."""
    kubectl = Path(sys.executable).with_name("kubectl")
    built = subprocess.run([kubectl, "kustomize", folder], capture_output=True, text=True, check=False)
    assert built.returncode == 0, built.stderr
    return built.stdout


@functools.cache
def overlay(name: str) -> tuple[Resource, ...]:
    """The resources of an overlay."""
    return tuple(yaml.safe_load_all(build(KUSTOMIZE / "overlays" / name)))


def of_kind(resources: tuple[Resource, ...], *kinds: str) -> list[Resource]:
    """Those of some kinds."""
    return [resource for resource in resources if resource["kind"] in kinds]


def named(resources: tuple[Resource, ...], kind: str, name: str) -> Resource:
    """The one of a kind with a name."""
    return next(r for r in of_kind(resources, kind) if r["metadata"]["name"] == name)


@dataclass(frozen=True)
class Workload:
    """Something that makes pods.

    Attributes:
        resource: the Deployment, StatefulSet or Job.
        spec: of its pods.
        labels: of its pods.
    """

    resource: Resource
    spec: Resource
    labels: Mapping[str, str]

    @property
    def name(self) -> str:
        """Of the Deployment, StatefulSet or Job."""
        return str(self.resource["metadata"]["name"])

    @property
    def containers(self) -> list[Resource]:
        """All of a pod's containers, those that start first included."""
        return [*self.spec.get("initContainers", []), *self.spec["containers"]]


def workloads(resources: tuple[Resource, ...]) -> list[Workload]:
    """Everything that makes pods."""
    return [
        Workload(r, r["spec"]["template"]["spec"], r["spec"]["template"]["metadata"]["labels"])
        for r in of_kind(resources, "Deployment", "StatefulSet", "Job")
    ]


def tiers(resources: tuple[Resource, ...]) -> dict[str, Workload]:
    """Router, verifier and speculator."""
    return {w.name: w for w in workloads(resources) if w.name in CONFIGS}


def environment(workload: Workload, resources: tuple[Resource, ...], secrets: Mapping[str, str]) -> dict[str, str]:
    """The variables that the kubelet would give a pod's first container.

    Args:
        secrets: content of every Secret.
    """
    container = workload.spec["containers"][0]
    found: dict[str, str] = {}
    for source in container.get("envFrom", []):
        found |= named(resources, "ConfigMap", source["configMapRef"]["name"])["data"]
    fields = {"status.podIP": "10.1.2.3", "metadata.name": f"{workload.name}-5f7c-x2x"}
    for entry in container["env"]:
        origin = entry.get("valueFrom", {})
        if "fieldRef" in origin:
            value = fields[origin["fieldRef"]["fieldPath"]]
        elif "secretKeyRef" in origin:
            value = secrets[origin["secretKeyRef"]["key"]]
        elif "resourceFieldRef" in origin:
            assert origin["resourceFieldRef"]["resource"] == "limits.cpu"
            value = container["resources"]["limits"]["cpu"]
        else:
            value = re.sub(r"\$\((\w+)\)", lambda match: found[match[1]], entry["value"])
        found[entry["name"]] = value
    return found


def example_secret() -> dict[str, str]:
    """Keys and values of secret.env.example."""
    lines = (KUSTOMIZE / "secret.env.example").read_text().splitlines()
    return dict(line.split("=", 1) for line in lines if line and not line.startswith("#"))


def selects(selector: Mapping[str, Any], labels: Mapping[str, str]) -> bool:
    """Whether a LabelSelector holds for labels; the empty one always does."""
    for key, value in selector.get("matchLabels", {}).items():
        if labels.get(key) != value:
            return False
    for term in selector.get("matchExpressions", []):
        assert term["operator"] == "In"
        if labels.get(term["key"]) not in term["values"]:
            return False
    return True


def reaches(resources: tuple[Resource, ...], source: Workload, target: Workload, port: int) -> bool:
    """Whether the NetworkPolicies let a pod of `source` open a TCP connection to one of `target`, same namespace."""
    out = any(_allows(peer, target.labels, port) for peer in _rules(resources, source, "Egress"))
    into = any(_allows(peer, source.labels, port) for peer in _rules(resources, target, "Ingress"))
    return out and into


def _rules(resources: tuple[Resource, ...], pod: Workload, direction: str) -> Iterator[Resource]:
    for policy in of_kind(resources, "NetworkPolicy"):
        spec = policy["spec"]
        if selects(spec["podSelector"], pod.labels) and direction in spec["policyTypes"]:
            yield from spec.get(direction.lower(), [])


def _allows(rule: Resource, labels: Mapping[str, str], port: int) -> bool:
    if "ports" in rule and all((entry["protocol"], entry["port"]) != ("TCP", port) for entry in rule["ports"]):
        return False
    peers = rule.get("from", rule.get("to"))
    if peers is None:
        return True
    return any(
        "podSelector" in peer and "namespaceSelector" not in peer and selects(peer["podSelector"], labels)
        for peer in peers
    )
