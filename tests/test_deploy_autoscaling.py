"""The autoscaling objects and the arithmetic that `bench.autoscale` drives the real stack with."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest
import yaml

from bench.day import arrivals, load
from bench.scaling import Policy, Rules, Scaler, ScalerConfig
from graftree.observe.exports import Export
from router.exports import EXPORTS
from tests.deploy_manifests import COMPONENT, KUSTOMIZE, OVERLAYS, ROOT, Resource, named, of_kind, overlay

MANIFEST = KUSTOMIZE / "overlays" / "keda" / "speculator.yaml"
FREE = Rules(0.0, (Policy("Percent", 1000, 1.0),))
CONFIG = ScalerConfig(least=1, most=16, threshold=100.0, poll=15.0, failures=3, fallback=4, up=FREE, down=FREE)


def targets(name: str) -> dict[str, Resource]:
    """Deployment -> what scales it."""
    return {
        r["spec"]["scaleTargetRef"]["name"]: r
        for r in of_kind(overlay(name), "HorizontalPodAutoscaler", "ScaledObject")
    }


@pytest.mark.parametrize("name", OVERLAYS)
def test_one_owner_of_each_number(name: str) -> None:
    """Whatever is scaled exists, is scaled by one object, and has no number of its own to be reset to."""
    scaled = targets(name)
    objects = of_kind(overlay(name), "HorizontalPodAutoscaler", "ScaledObject")
    assert len(objects) == len(scaled)
    for deployment in of_kind(overlay(name), "Deployment"):
        has_number = "replicas" in deployment["spec"]
        assert has_number != (deployment["metadata"]["name"] in scaled)
    expected = {"router", "verifier", "speculator"} if name in ("hpa", "keda") else set()
    assert set(scaled) == expected


@pytest.mark.parametrize("name", ["hpa", "keda"])
def test_verifiers_go_slowly(name: str) -> None:
    """A verifier takes its KV with it: minutes of lower load, then one at a time; never the last but one."""
    spec = targets(name)["verifier"]["spec"]
    down = spec["behavior"]["scaleDown"]
    assert down["stabilizationWindowSeconds"] >= 600
    assert down["policies"] == [{"type": "Pods", "value": 1, "periodSeconds": 300}]
    assert spec["minReplicas"] >= 2


def test_hpa_needs_no_controller() -> None:
    """The hpa overlay scales by CPU alone, of which every container has a request."""
    for scaler in targets("hpa").values():
        assert scaler["apiVersion"] == "autoscaling/v2"
        for metric in scaler["spec"]["metrics"]:
            assert metric["type"] == "Resource"
            assert metric["resource"]["name"] == "cpu"


def test_scaled_object() -> None:
    """The ScaledObject has what KEDA needs, never scales to zero, and asks for a metric that routers have."""
    scaled = named(overlay("keda"), "ScaledObject", "speculator")
    assert scaled["apiVersion"] == "keda.sh/v1alpha1"
    spec = scaled["spec"]
    assert spec["minReplicaCount"] == 1
    assert spec["minReplicaCount"] <= spec["fallback"]["replicas"] <= spec["maxReplicaCount"]
    exported: dict[str, Export[object]] = {export.name: export for export in EXPORTS}  # type: ignore[misc]
    for trigger in spec["triggers"]:
        assert trigger["metricType"] == "AverageValue"  # what fallback works with
        assert {"serverAddress", "query", "threshold"} <= set(trigger["metadata"])
        names = re.findall(r"graftree_\w+", trigger["metadata"]["query"])
        assert names
        assert set(names) <= set(exported)


def test_service_monitor() -> None:
    """Prometheus scrapes a port that exists, as often as the ScaledObject's query needs."""
    (monitor,) = of_kind(overlay("keda"), "ServiceMonitor")
    (endpoint,) = monitor["spec"]["endpoints"]
    assert monitor["spec"]["jobLabel"] == COMPONENT  # the alerts' jobs are the tiers
    services = of_kind(overlay("keda"), "Service")
    assert any(port["name"] == endpoint["port"] for service in services for port in service["spec"]["ports"])
    query = named(overlay("keda"), "ScaledObject", "speculator")["spec"]["triggers"][0]["metadata"]["query"]
    for window in re.findall(r"\[(\d+)m\]", query):
        assert int(window) * 60 >= 4 * int(endpoint["interval"].removesuffix("s"))


def test_alerts_and_dashboard_are_deployed() -> None:
    """The PrometheusRule is alerts.yml, the ConfigMap holds the dashboard: neither is a copy that can grow old."""
    prometheus = ROOT / "deploy" / "prometheus"
    (rule,) = of_kind(overlay("keda"), "PrometheusRule")
    assert rule["spec"]["groups"] == yaml.safe_load((prometheus / "alerts.yml").read_text())["groups"]
    dashboard = named(overlay("keda"), "ConfigMap", "graftree-dashboard")
    shown = (ROOT / "deploy" / "grafana" / "dashboards" / "graftree.json").read_text()
    assert dashboard["data"] == {"graftree.json": shown}
    assert dashboard["metadata"]["labels"]["grafana_dashboard"] == "1"


def test_the_deployed_numbers_are_simulated() -> None:
    """`ScalerConfig` reads the manifest that is deployed."""
    config = ScalerConfig.read(MANIFEST)
    assert (config.least, config.most, config.poll) == (1, 16, 15)
    assert config.up.window == 0
    assert config.down == Rules(180, (Policy("Percent", 50, 60),))
    assert config.faster(15).down == Rules(12.0, (Policy("Percent", 50, 4.0),))


def test_formula() -> None:
    """ceil(demand / threshold), within the bounds, and no change within a tenth of the target."""
    for demand, expected in ((0, 1), (99, 1), (350, 4), (400, 4), (5000, 16)):
        assert Scaler(CONFIG, 2).decide(0, demand) == expected
    for demand in (361, 400, 439):
        assert Scaler(CONFIG, 4).decide(0, demand) == 4
    assert Scaler(CONFIG, 4).decide(0, 441) == 5
    assert Scaler(CONFIG, 4).decide(0, 359) == 4  # less than a tenth off by rounding up again


def test_down_window() -> None:
    """The highest need of the window holds: a dip shorter than it changes nothing."""
    scaler = Scaler(replace(CONFIG, down=replace(FREE, window=60.0)), 1)
    assert scaler.decide(0, 800) == 8
    assert [scaler.decide(at, 100) for at in (15, 30, 45, 60)] == [8, 8, 8, 8]
    assert scaler.decide(75, 100) == 1


def test_up_window() -> None:
    """With a window upwards, a spike shorter than it changes nothing."""
    scaler = Scaler(replace(CONFIG, up=replace(FREE, window=30.0)), 1)
    assert scaler.decide(0, 100) == 1
    assert scaler.decide(15, 800) == 1
    assert scaler.decide(30, 800) == 1
    assert scaler.decide(45, 800) == 8


def test_policies() -> None:
    """The larger allowance decides upwards; downwards half of what there was at the period's start, per period."""
    up = Rules(0.0, (Policy("Percent", 100, 15.0), Policy("Pods", 4, 15.0)))
    down = Rules(0.0, (Policy("Percent", 50, 60.0),))
    scaler = Scaler(replace(CONFIG, up=up, down=down), 1)
    assert [scaler.decide(at, 1600) for at in (0, 15, 30)] == [5, 10, 16]
    assert [scaler.decide(at, 0) for at in (100, 130, 161, 222, 283)] == [8, 8, 4, 2, 1]


def test_fallback() -> None:
    """Without an answer the number stays for a while, then the fallback holds until answers come again."""
    scaler = Scaler(CONFIG, 9)
    assert [scaler.decide(at, None) for at in (0, 15)] == [9, 9]
    assert scaler.decide(30, None) == 4
    assert scaler.decide(45, None) == 4
    assert scaler.decide(60, 700) == 7


def test_a_day() -> None:
    """The same seed gives the same day; its busiest and quietest times are where the shape says."""
    day = arrivals(1000.0, 2.0, seed=3)
    assert day == arrivals(1000.0, 2.0, seed=3)
    assert day != arrivals(1000.0, 2.0, seed=4)
    night = sum(request.at < 200 for request in day) / 200
    burst = sum(510 <= request.at < 570 for request in day) / 60
    assert night == pytest.approx(2.0 * load(0.1), abs=0.12)
    assert burst == pytest.approx(2.0, abs=0.6)
