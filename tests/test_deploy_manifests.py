"""Every overlay is a valid manifest for old and new clusters, and keeps the rules of a careful operator."""

from __future__ import annotations

import json
import os
import re
from pathlib import Path
from urllib.parse import urlsplit

import kubernetes_validate
import pytest
import yaml

from graftree.config import VerifierConfig, load
from graftree.pod import READINESS
from tests.deploy_manifests import (
    COMPONENT,
    CONFIGS,
    KUSTOMIZE,
    OVERLAYS,
    Workload,
    build,
    environment,
    example_secret,
    named,
    of_kind,
    overlay,
    reaches,
    selects,
    tiers,
    workloads,
)

# Kinds of other projects' controllers, of which no schema is at hand.
CUSTOM = {"keda": {"ScaledObject", "ServiceMonitor", "PrometheusRule"}}
MARGIN_SECONDS = 5  # from the end of the longest drain to the kill

every_overlay = pytest.mark.parametrize("name", OVERLAYS)


def seconds_before_stop(workload: Workload) -> int:
    """What preStop takes before the process gets its SIGTERM."""
    hook = workload.spec["containers"][0].get("lifecycle", {}).get("preStop")
    return 0 if hook is None else int(hook["exec"]["command"][1])


def test_all_overlays_are_tested() -> None:
    """A new overlay is tested, too."""
    assert sorted(OVERLAYS) == sorted(path.name for path in (KUSTOMIZE / "overlays").iterdir())


@every_overlay
@pytest.mark.parametrize("version", ["1.28", "1.37"])
def test_schemas(name: str, version: str) -> None:
    """Strictly valid for an old and a new Kubernetes; only the kinds of known controllers are not checked here."""
    unknown = set()
    for resource in overlay(name):
        try:
            kubernetes_validate.validate(resource, version, strict=True)
        except kubernetes_validate.SchemaNotFoundError:
            unknown.add(resource["kind"])
    assert unknown == CUSTOM.get(name, set())


@every_overlay
def test_tiers_start_with_their_environment(name: str) -> None:
    """Every key of ConfigMaps and Secret is one of graftree/config.py, and every value is allowed there."""
    resources = overlay(name)
    assert set(tiers(resources)) == set(CONFIGS)
    for tier, workload in tiers(resources).items():
        environ = environment(workload, resources, example_secret())
        config = load(CONFIGS[tier], [], environ)
        assert {key for key in environ if key != "POD_IP" and not key.startswith("GRAFTREE_")} <= {"TRITON_CACHE_DIR"}
        for key in environ:
            field = key.removeprefix("GRAFTREE_").lower()
            assert key in ("POD_IP", "TRITON_CACHE_DIR") or field in CONFIGS[tier].model_fields, key
        container = workload.spec["containers"][0]
        ports = {port["name"]: port["containerPort"] for port in container["ports"]}
        assert config.advertise == f"10.1.2.3:{config.port}"
        assert ports["grpc"] == config.port
        assert config.metrics_listen == f"0.0.0.0:{ports['metrics']}"
        assert config.health_listen == f"0.0.0.0:{ports['health']}"


@every_overlay
def test_verifiers_share_kv(name: str) -> None:
    """Verifiers, and they alone, are told of the KV Redis, which is not the state's; they may go without."""
    resources = overlay(name)
    for tier, workload in tiers(resources).items():
        (container,) = workload.spec["containers"]
        entries = {entry["name"]: entry for entry in container["env"]}
        assert ("GRAFTREE_KV_REDIS" in entries) == (tier == "verifier")
    verifier = tiers(resources)["verifier"]
    config = load(CONFIGS["verifier"], [], environment(verifier, resources, example_secret()))
    assert isinstance(config, VerifierConfig)
    assert (urlsplit(config.redis).hostname, urlsplit(config.kv_redis).hostname) == ("redis-state", "redis-kv")
    entry = {e["name"]: e for e in verifier.spec["containers"][0]["env"]}["GRAFTREE_KV_REDIS"]
    assert entry["valueFrom"]["secretKeyRef"]["optional"] is True


def test_the_secret_holds_nothing_but_configuration() -> None:
    """Its keys are keys of the configuration and the password of the Redis in the cluster, and no value is real."""
    assert set(example_secret()) == {"GRAFTREE_REDIS", "GRAFTREE_KV_REDIS", "REDIS_PASSWORD"}
    assert all("CHANGE-ME" in value for value in example_secret().values())
    assert [r["kind"] for name in OVERLAYS for r in of_kind(overlay(name), "Secret")] == []


@every_overlay
def test_probes(name: str) -> None:
    """Liveness asks whether the process answers, readiness whether it takes work; loading may take its time."""
    for workload in tiers(overlay(name)).values():
        (container,) = workload.spec["containers"]
        live, ready, start = (container[f"{kind}Probe"] for kind in ("liveness", "readiness", "startup"))
        ports = {port["name"]: port["containerPort"] for port in container["ports"]}
        assert live["grpc"] == start["grpc"] == {"port": ports["health"]}
        assert ready["grpc"] == live["grpc"] | {"service": READINESS}
        assert start["periodSeconds"] * start["failureThreshold"] >= 300
        assert live["periodSeconds"] * live["failureThreshold"] > ready["periodSeconds"] * ready["failureThreshold"]
    for workload in workloads(overlay(name)):
        if workload.resource["kind"] != "Job":
            assert all({"livenessProbe", "readinessProbe"} <= set(container) for container in workload.containers)


@every_overlay
def test_grace_fits_the_drain(name: str) -> None:
    """A pod is killed only after its preStop hook, its longest drain and a margin."""
    resources = overlay(name)
    for tier, workload in tiers(resources).items():
        config = load(CONFIGS[tier], [], environment(workload, resources, example_secret()))
        needed = seconds_before_stop(workload) + config.drain_seconds + MARGIN_SECONDS
        assert workload.spec["terminationGracePeriodSeconds"] >= needed
    # Clients find routers through a Service: endpoints must be gone before the drain refuses work.
    assert seconds_before_stop(tiers(resources)["router"]) >= 5


@every_overlay
def test_resources_are_bounded(name: str) -> None:
    """Every container has requests and limits of CPU, memory and disk, and every temporary folder has a size."""
    for workload in workloads(overlay(name)):
        for container in workload.containers:
            for kind in ("requests", "limits"):
                assert {"cpu", "memory", "ephemeral-storage"} <= set(container["resources"][kind]), workload.name
        for volume in workload.spec.get("volumes", []):
            assert "emptyDir" not in volume or volume["emptyDir"]["sizeLimit"]


@every_overlay
def test_images_are_pinned(name: str) -> None:
    """Every image has a tag that is a version; none floats."""
    for workload in workloads(overlay(name)):
        for container in workload.containers:
            _, _, tag = container["image"].partition(":")
            assert re.match(r"\d+\.\d+", tag), container["image"]


@every_overlay
def test_no_privilege(name: str) -> None:
    """All pods fit Kubernetes' restricted profile, with a read-only root and without anything of the host."""
    resources = overlay(name)
    (namespace,) = of_kind(resources, "Namespace")
    assert namespace["metadata"]["labels"]["pod-security.kubernetes.io/enforce"] == "restricted"
    for workload in workloads(resources):
        pod = workload.spec["securityContext"]
        assert pod["runAsNonRoot"] is True
        assert pod["runAsUser"] > 0
        assert pod["seccompProfile"] == {"type": "RuntimeDefault"}
        assert not {"hostNetwork", "hostPID", "hostIPC"} & set(workload.spec)
        assert all({"hostPath"} & set(volume) == set() for volume in workload.spec.get("volumes", []))
        for container in workload.containers:
            context = container["securityContext"]
            assert context["allowPrivilegeEscalation"] is False
            assert context["readOnlyRootFilesystem"] is True
            assert context["capabilities"] == {"drop": ["ALL"]}
            assert "privileged" not in context
            assert all("hostPort" not in port for port in container.get("ports", []))


@every_overlay
def test_no_tokens_and_no_look_alike_variables(name: str) -> None:
    """No pod holds a token of the API server, accounts are one per tier, and Services add no GRAFTREE_ variables."""
    resources = overlay(name)
    accounts = {r["metadata"]["name"]: r for r in of_kind(resources, "ServiceAccount")}
    assert all(account["automountServiceAccountToken"] is False for account in accounts.values())
    for workload in workloads(resources):
        assert workload.spec["automountServiceAccountToken"] is False
        assert workload.spec["enableServiceLinks"] is False
        assert workload.spec["serviceAccountName"] == workload.name
        assert workload.name in accounts
    assert of_kind(resources, "Role", "ClusterRole", "RoleBinding", "ClusterRoleBinding") == []


@every_overlay
def test_disruption_and_spread(name: str) -> None:
    """Each tier has one budget, which lets a drained node make progress, and spreads over nodes and zones."""
    resources = overlay(name)
    for workload in tiers(resources).values():
        (budget,) = (
            r for r in of_kind(resources, "PodDisruptionBudget") if selects(r["spec"]["selector"], workload.labels)
        )
        assert budget["spec"]["maxUnavailable"] in (1, "50%")
        spread = workload.spec["topologySpreadConstraints"]
        assert {entry["topologyKey"] for entry in spread} == {"kubernetes.io/hostname", "topology.kubernetes.io/zone"}
        assert all(selects(entry["labelSelector"], workload.labels) for entry in spread)


@every_overlay
def test_network(name: str) -> None:
    """Everything is denied but the arrows of the design, and those are allowed."""
    resources = overlay(name)
    deny = named(resources, "NetworkPolicy", "default-deny")["spec"]
    assert deny == {"podSelector": {}, "policyTypes": ["Ingress", "Egress"]}
    by_name = {workload.name: workload for workload in workloads(resources)}
    ports = {"router": 8000, "verifier": 8100, "speculator": 8200, "redis-state": 6379, "redis-kv": 6379}
    allowed = {
        (source, target)
        for source in by_name
        for target in by_name
        for port in {ports.get(target, 8000), 9100}
        if reaches(resources, by_name[source], by_name[target], port)
    }
    redis = {(tier, store) for tier in CONFIGS for store in ("redis-state", "redis-kv")}
    assert allowed == {("router", "verifier"), ("router", "speculator")} | redis
    (clients,) = named(resources, "NetworkPolicy", "router")["spec"]["ingress"]
    assert clients["from"] == [{"namespaceSelector": {"matchLabels": {"graftree.dev/clients": "true"}}}]


@every_overlay
def test_services_lead_to_pods(name: str) -> None:
    """Each Service selects pods that have its ports; every tier has a headless one with its metrics."""
    resources = overlay(name)
    scraped = set()
    for service in of_kind(resources, "Service"):
        chosen = [w for w in workloads(resources) if selects({"matchLabels": service["spec"]["selector"]}, w.labels)]
        (workload,) = chosen
        offered = {port["name"]: port["containerPort"] for port in workload.spec["containers"][0]["ports"]}
        for port in service["spec"]["ports"]:
            assert offered[port["targetPort"]] == port["port"]
        if any(port["name"] == "metrics" for port in service["spec"]["ports"]):
            assert service["spec"]["clusterIP"] == "None"
            scraped.add(workload.name)
    assert scraped == set(CONFIGS)


@every_overlay
def test_models_are_written_once_and_read_everywhere(name: str) -> None:
    """The Job alone may write the volume of models, and it pulls the model that router and verifiers name."""
    resources = overlay(name)
    for workload in [*tiers(resources).values(), workload_of(resources, "models")]:
        (mount,) = (m for m in workload.spec["containers"][0]["volumeMounts"] if m["mountPath"] == "/models")
        assert mount.get("readOnly", False) == (workload.name != "models")
    sources = [
        source["configMapRef"]["name"]
        for tier in ("models", "router", "verifier")
        for source in workload_of(resources, tier).spec["containers"][0]["envFrom"]
        if source["configMapRef"]["name"].startswith("graftree-model-")
    ]
    assert len(sources) == 3
    assert len(set(sources)) == 1


def workload_of(resources: tuple[dict[str, object], ...], name: str) -> Workload:
    return next(workload for workload in workloads(resources) if workload.name == name)


@every_overlay
def test_redis_keeps_and_forgets(name: str) -> None:
    """State is appended to a file and never evicted; KV blocks are evicted and never written."""
    resources = overlay(name)
    state, cache = (
        " ".join(workload_of(resources, f"redis-{kind}").spec["containers"][0]["args"]) for kind in ("state", "kv")
    )
    assert "--appendonly yes" in state
    assert "--maxmemory-policy noeviction" in state
    assert "--appendonly no" in cache
    assert "--maxmemory-policy allkeys-lru" in cache
    assert named(resources, "StatefulSet", "redis-state")["spec"]["volumeClaimTemplates"]


def test_selectors_are_disjoint() -> None:
    """No Deployment takes another's pods."""
    for name in OVERLAYS:
        everything = workloads(overlay(name))
        for workload in everything:
            if "selector" in workload.resource["spec"]:
                chosen = [w.name for w in everything if selects(workload.resource["spec"]["selector"], w.labels)]
                assert chosen == [workload.name]
                assert COMPONENT in workload.labels


def test_gpu_overlay() -> None:
    """Verifiers, and they alone, ask for a GPU, in whole ones, and a roll-out needs no spare one."""
    resources = overlay("gpu")
    for workload in workloads(resources):
        asks = "nvidia.com/gpu" in json.dumps(workload.spec["containers"])
        assert asks == (workload.name == "verifier")
    verifier = tiers(resources)["verifier"]
    limits, requests = (verifier.spec["containers"][0]["resources"][kind] for kind in ("limits", "requests"))
    assert limits["nvidia.com/gpu"] == requests["nvidia.com/gpu"] == 1
    assert verifier.resource["spec"]["strategy"]["rollingUpdate"] == {"maxSurge": 0, "maxUnavailable": 1}
    assert verifier.spec["containers"][0]["image"].endswith("-gpu")


def test_tls_component(tmp_path: Path) -> None:
    """With the component, every file that the configuration names is mounted read-only from a Secret."""
    folders = [os.path.relpath(KUSTOMIZE / name, tmp_path) for name in ("overlays/minimal", "components/tls")]
    (tmp_path / "kustomization.yaml").write_text(json.dumps({"resources": folders[:1], "components": folders[1:]}))
    resources = tuple(yaml.safe_load_all(build(tmp_path)))
    for tier, workload in tiers(resources).items():
        environ = environment(workload, resources, example_secret())
        config = load(CONFIGS[tier], [], environ)
        (container,) = workload.spec["containers"]
        volumes = {volume["name"]: volume for volume in workload.spec["volumes"]}
        mounts = {m["mountPath"]: volumes[m["name"]] for m in container["volumeMounts"] if m.get("readOnly")}
        files = {value for value in environ.values() if value.startswith("/etc/graftree/")}
        assert {config.tls_certificate, config.tls_key} <= files
        for path in files:
            folder, _, name = path.rpartition("/")
            assert name in ("tls.crt", "tls.key", "ca.crt", "keys.json")
            assert mounts[folder]["secret"]["defaultMode"] == 0o440
        # Routers take clients without a certificate of their own, the other tiers take routers alone.
        assert bool(config.tls_client_ca) == (tier != "router")
        for resource in resources:
            kubernetes_validate.validate(resource, "1.37", strict=True)


def test_kustomize_folder_has_no_orphans() -> None:
    """Every file is named by a kustomization."""
    named_files = set()
    for path in KUSTOMIZE.rglob("kustomization.yaml"):
        named_files |= {path.parent / Path(word) for word in re.findall(r"[\w./-]+\.yaml", path.read_text())}
    files = {path for path in KUSTOMIZE.rglob("*.yaml") if path.name != "kustomization.yaml"}
    assert files - named_files == set()
