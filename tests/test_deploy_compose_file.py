"""docker-compose.yml, its GPU override and the Dockerfiles, read: what can be known without an engine."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from graftree.config import load
from tests.deploy_manifests import CONFIGS, ROOT

DOCKER = ROOT / "deploy" / "docker"
COMPOSE: dict[str, Any] = yaml.safe_load((ROOT / "docker-compose.yml").read_text())
GPU: dict[str, Any] = yaml.safe_load((ROOT / "docker-compose.gpu.yml").read_text())
SERVICES: dict[str, dict[str, Any]] = COMPOSE["services"]
RUNNING = [name for name in SERVICES if name != "models"]  # which ends when it is done

every_service = pytest.mark.parametrize("name", SERVICES)


def filled(text: str) -> str:
    """A value with the defaults of its ${VARIABLE:-default}."""
    return re.sub(r"\$\{\w+:-([^}]*)\}", r"\1", str(text))


def seconds(text: str) -> float:
    """Of "90s" or "2m"."""
    return float(text[:-1]) * {"s": 1, "m": 60}[text[-1]]


@every_service
def test_no_privilege(name: str) -> None:
    """Nobody is root, roots are read-only, nothing is privileged, no capability is left."""
    service = SERVICES[name]
    assert int(service["user"].split(":")[0]) > 0
    assert service["read_only"] is True
    assert service["cap_drop"] == ["ALL"]
    assert service["security_opt"] == ["no-new-privileges:true"]
    assert not {"privileged", "cap_add", "network_mode", "pid", "ipc", "devices"} & set(service)
    assert all("docker.sock" not in volume for volume in service.get("volumes", []))


@every_service
def test_limits_and_pinned_images(name: str) -> None:
    """Memory, CPU, processes and logs are bounded; every image has a version."""
    service = SERVICES[name]
    assert {"mem_limit", "cpus", "pids_limit"} <= set(service)
    assert service["logging"]["options"]["max-size"]
    _, _, tag = filled(service["image"]).rpartition(":")
    assert re.match(r"v?\d+\.\d+", tag)


@pytest.mark.parametrize("name", RUNNING)
def test_health_and_restart(name: str) -> None:
    """Each has a health check and comes back by itself."""
    assert SERVICES[name]["restart"] == "unless-stopped"
    assert {"test", "interval", "timeout", "retries"} <= set(SERVICES[name]["healthcheck"])


@pytest.mark.parametrize("tier", CONFIGS)
def test_tiers_start_with_their_environment(tier: str) -> None:
    """Variables are keys of graftree/config.py with values it takes; ports and times fit together."""
    service = SERVICES[tier]
    environ = {key: filled(value) for key, value in service["environment"].items()}
    dockerfile = (DOCKER / f"{tier}.Dockerfile").read_text()
    baked = dict(re.findall(r"(GRAFTREE_\w+)=(\S+)", dockerfile))
    config = load(CONFIGS[tier], [], baked | environ)
    unknown = {key for key in environ if key.removeprefix("GRAFTREE_").lower() not in CONFIGS[tier].model_fields}
    assert unknown == set()
    assert config.host == "0.0.0.0"
    assert f"EXPOSE {config.port}\n" in dockerfile
    assert service["healthcheck"]["test"] == ["CMD", "python", "/opt/probe.py", str(config.port), "readiness"]
    assert seconds(service["stop_grace_period"]) >= config.drain_seconds + 5
    # Any number of them: no fixed names, and only the router has a port on the host, for this machine alone.
    assert "container_name" not in service
    assert all(filled(port).startswith("127.0.0.1:") for port in service.get("ports", []))
    assert ("ports" in service) == (tier == "router")


def test_redis_keeps_and_forgets() -> None:
    """State is appended to a file and never evicted; KV blocks are evicted and never written."""
    state, cache = (" ".join(SERVICES[name]["command"]) for name in ("redis-state", "redis-kv"))
    assert "--appendonly yes" in state
    assert "--maxmemory-policy noeviction" in state
    assert "--appendonly no" in cache
    assert "--maxmemory-policy allkeys-lru" in cache
    assert any(volume.startswith("redis-state:") for volume in SERVICES["redis-state"]["volumes"])
    assert "volumes" not in SERVICES["redis-kv"]


def test_verifiers_share_kv() -> None:
    """The KV Redis is the verifiers' alone, and they start without it."""
    told = {tier for tier in CONFIGS if "GRAFTREE_KV_REDIS" in SERVICES[tier]["environment"]}
    assert told == {"verifier"}
    assert SERVICES["verifier"]["environment"]["GRAFTREE_KV_REDIS"] == "redis://redis-kv:6379/0"
    assert SERVICES["verifier"]["depends_on"]["redis-kv"] == {"condition": "service_started"}


def test_only_the_edge_reaches_the_outside() -> None:
    """Redis, verifiers and speculators are on an internal network alone; models are written by one service."""
    assert COMPOSE["networks"]["tiers"] == {"internal": True}
    for name in ("redis-state", "redis-kv", "verifier", "speculator"):
        assert SERVICES[name]["networks"] == ["tiers"]
        assert "ports" not in SERVICES[name]
    for tier in CONFIGS:
        assert SERVICES[tier]["volumes"] == ["models:/models:ro"]
        assert SERVICES[tier]["depends_on"]["models"] == {"condition": "service_completed_successfully"}
    assert SERVICES["models"]["volumes"] == ["models:/models"]
    assert SERVICES["models"]["networks"] == ["edge"]


def test_dashboards_come_with_a_profile() -> None:
    """Prometheus and Grafana start on request, with what is provisioned in the repository."""
    profiled = {name for name, service in SERVICES.items() if service.get("profiles") == ["observability"]}
    assert profiled == {"prometheus", "grafana"}
    for name in profiled:
        for volume in SERVICES[name]["volumes"]:
            if volume.startswith("./"):
                assert (ROOT / volume.split(":")[0]).exists(), volume


def test_gpu_override() -> None:
    """The override gives the verifier, and it alone, a GPU and an image with torch for it."""
    assert set(GPU["services"]) == {"verifier", "models"}
    verifier = GPU["services"]["verifier"]
    (device,) = verifier["deploy"]["resources"]["reservations"]["devices"]
    assert device == {"driver": "nvidia", "count": 1, "capabilities": ["gpu"]}
    environ = {key: value for key, value in verifier["environment"].items() if key.startswith("GRAFTREE_")}
    assert load(CONFIGS["verifier"], [], environ).device == "cuda"
    for service in GPU["services"].values():
        assert service["build"]["args"] == {"TORCH": "gpu"}
        assert service["image"] == filled(SERVICES["verifier"]["image"]) + "-gpu"


@pytest.mark.parametrize("tier", CONFIGS)
def test_dockerfiles(tier: str) -> None:
    """Several stages from one pinned base, a user that is not root, no shell around the process."""
    lines = (DOCKER / f"{tier}.Dockerfile").read_text().splitlines()
    assert lines.count("FROM ${PYTHON_IMAGE} AS build") == 1
    assert [line for line in lines if line.startswith("FROM ")][-1] == "FROM ${PYTHON_IMAGE}"
    (base,) = (line.split("=", 1)[1] for line in lines if line.startswith("ARG PYTHON_IMAGE="))
    assert re.fullmatch(r"python:3\.11(\.\d+)?-slim-bookworm", base)
    assert lines[-1].startswith('ENTRYPOINT ["python", "-m", ')
    users = [line for line in lines if line.startswith("USER ")]
    assert users == ["USER 10001:10001"]


def test_the_routers_image_has_no_torch() -> None:
    """It is built from the package's own dependencies, of which none is torch, and holds no other tier."""
    text = (DOCKER / "router.Dockerfile").read_text()
    assert "requirements.py tracing >" in text
    assert re.findall(r"^COPY (\w+) \w+$", text, re.MULTILINE) == ["graftree", "router"]
    assert "torch" not in text.replace("No torch", "")


def test_the_context_is_small() -> None:
    """Everything is ignored but what the Dockerfiles copy."""
    rules = [line for line in (ROOT / ".dockerignore").read_text().splitlines() if not line.startswith("#")]
    assert rules[0] == "*"
    allowed = {rule.removeprefix("!") for rule in rules if rule.startswith("!")}
    copied = set()
    for path in DOCKER.glob("*.Dockerfile"):
        for line in re.findall(r"^COPY (?!--)(.*) \S+$", path.read_text(), re.MULTILINE):
            copied |= {re.sub(r"/\$\{TORCH\}", "", word) for word in line.split()}
    assert allowed == copied
    assert all((ROOT / Path(path)).exists() for path in allowed)
