"""Dashboard, alerts and scalers: every expression parses, and asks for metrics and labels that exist."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import promql_parser
import pytest
import yaml

from graftree.observe.exports import Export
from graftree.observe.pod_exports import EXPORTS as OF_EVERY_POD
from router.exports import EXPORTS as OF_ROUTERS
from router.metrics import Outcome
from speculator_service.exports import EXPORTS as OF_SPECULATORS
from verifier_service.exports import EXPORTS as OF_VERIFIERS

ROOT = Path(__file__).parent.parent
DEPLOY = ROOT / "deploy"
EXPORTS: list[Export[Any]] = [*OF_EVERY_POD, *OF_ROUTERS, *OF_VERIFIERS, *OF_SPECULATORS]
# What Prometheus adds to every series, and to those of buckets.
TARGET_LABELS = {"job", "instance"}
ALERTS = yaml.safe_load((DEPLOY / "prometheus/alerts.yml").read_text())
DASHBOARD = json.loads((DEPLOY / "grafana/dashboards/graftree.json").read_text())


def series() -> dict[str, set[str]]:
    """Series name -> its labels."""
    found: dict[str, set[str]] = {"up": TARGET_LABELS}
    for export in EXPORTS:
        labels = {*export.labels, *TARGET_LABELS}
        names = [export.name]
        if export.kind == "histogram":
            names = [f"{export.name}_{part}" for part in ("bucket", "sum", "count")]
            labels |= {"le"}
        for name in names:
            found[name] = labels
    return found


def panels() -> list[dict[str, Any]]:
    return [panel for panel in DASHBOARD["panels"] if panel["type"] != "row"]


def expressions() -> Iterator[tuple[str, str]]:
    """(where, PromQL) of everything that is deployed or documented."""
    for group in ALERTS["groups"]:
        for rule in group["rules"]:
            yield rule["alert"], rule["expr"]
    for panel in panels():
        for target in panel["targets"]:
            yield panel["title"], target["expr"].replace("$__rate_interval", "1m")
    for path in sorted(DEPLOY.rglob("*.yaml")):
        for query in re.findall(r"^\s*query: (.+)$", path.read_text(), re.MULTILINE):
            yield str(path.relative_to(ROOT)), query.strip("'\"")


ALL = list(expressions())


def selectors(node: Any) -> Iterator[Any]:
    """Every vector selector of a parsed expression."""
    if isinstance(node, promql_parser.VectorSelector):
        yield node
    for name in ("expr", "lhs", "rhs", "vector_selector", "vs", "param"):
        child = getattr(node, name, None)
        if child is not None and not isinstance(child, str):
            yield from selectors(child)
    for child in getattr(node, "args", None) or ():
        yield from selectors(child)


def test_the_walk_finds_selectors() -> None:
    """The helper sees through functions, ranges, aggregations, operators and subqueries."""
    text = 'histogram_quantile(0.9, sum by (le) (rate(a[1m]))) / (b{x="1"} > 2) or -max_over_time(c[5m:1m])'
    assert [each.name for each in selectors(promql_parser.parse(text))] == ["a", "b", "c"]


@pytest.mark.parametrize(("where", "expression"), ALL, ids=[f"{where}-{i}" for i, (where, _) in enumerate(ALL)])
def test_every_expression_asks_for_what_there_is(where: str, expression: str) -> None:
    """It parses, each metric is one that a tier serves, each label one of the metric's, counters come as rates."""
    known = series()
    found = list(selectors(promql_parser.parse(expression)))
    assert found, where
    for selector in found:
        assert selector.name in known, f"{where}: no metric {selector.name}"
        labels = {matcher.name for matcher in selector.matchers.matchers}
        assert labels <= known[selector.name], (
            f"{where}: {selector.name} has no label {labels - known[selector.name]}"
        )
    grouped = set(re.findall(r"[a-z_]+", ",".join(re.findall(r"\bby \(([^)]*)\)", expression))))
    assert grouped <= set().union(*(known[selector.name] for selector in found)), where
    counters = {selector.name for selector in found if re.search(r"_(total|bucket|sum|count)$", selector.name)}
    bare = {name for name in counters if not re.search(rf"(rate|increase)\({name}(\{{[^}}]*\}})?\[", expression)}
    assert not bare, f"{where}: {bare} are counters"


def test_documents_name_what_there_is() -> None:
    """Every metric that a document names is served."""
    known = series() | {export.name: set[str]() for export in EXPORTS}
    for path in sorted((ROOT / "docs").glob("*.md")):
        named = set(re.findall(r"\bgraftree_[a-z0-9_]*[a-z0-9]\b", path.read_text()))
        prefixes = {"graftree_router", "graftree_verifier", "graftree_speculator", "graftree_pod", "graftree_tls"}
        assert named - prefixes - set(known) == set(), path.name


def test_outcomes_are_those_of_the_code() -> None:
    """Wherever an outcome is named, it is one of the router's."""
    named = set()
    for _, expression in ALL:
        for value in re.findall(r'outcome(?:=|!=|=~|!~)"([^"]*)"', expression):
            named |= set(value.split("|"))
    assert named
    assert named <= {str(outcome) for outcome in Outcome}


def test_alerts_are_complete_and_explained() -> None:
    """Each has a severity and a summary, names are unique, and docs/operations.md says what each means."""
    rules = [rule for group in ALERTS["groups"] for rule in group["rules"]]
    names = [rule["alert"] for rule in rules]
    assert len(names) == len(set(names)) > 15
    page = (ROOT / "docs/operations.md").read_text()
    for rule in rules:
        assert rule["labels"]["severity"] in ("critical", "warning")
        assert rule["annotations"]["summary"]
        assert rule["alert"] in page, f"docs/operations.md does not explain {rule['alert']}"
    assert set(re.findall(r"`(Graftree\w+)`", page)) <= set(names)


def test_the_dashboard_is_one_that_grafana_loads() -> None:
    """Ids are unique, panels do not overlap, every panel has its data source by variable and says what it shows."""
    ids = [panel["id"] for panel in DASHBOARD["panels"]]
    assert len(ids) == len(set(ids))
    taken: set[tuple[int, int]] = set()
    for panel in DASHBOARD["panels"]:
        place = panel["gridPos"]
        cells = {(place["x"] + i, place["y"] + j) for i in range(place["w"]) for j in range(place["h"])}
        assert place["x"] + place["w"] <= 24
        assert not cells & taken, panel["title"]
        taken |= cells
    for panel in panels():
        assert panel["datasource"] == {"type": "prometheus", "uid": "${datasource}"}
        refs = [target["refId"] for target in panel["targets"]]
        assert len(refs) == len(set(refs))
    (variable,) = DASHBOARD["templating"]["list"]
    assert (variable["name"], variable["type"]) == ("datasource", "datasource")


def test_provisioning_finds_the_dashboard() -> None:
    """Data source and provider are of the versions and folders that the compose file mounts."""
    source = yaml.safe_load((DEPLOY / "grafana/provisioning/datasources/prometheus.yml").read_text())
    provider = yaml.safe_load((DEPLOY / "grafana/provisioning/dashboards/graftree.yml").read_text())
    assert source["datasources"][0]["type"] == "prometheus"
    folder = provider["providers"][0]["options"]["path"]
    compose = yaml.safe_load((ROOT / "docker-compose.yml").read_text())
    mounts = compose["services"]["grafana"]["volumes"]
    assert f"./deploy/grafana/dashboards:{folder}:ro" in mounts
    assert source["datasources"][0]["url"] == "http://prometheus:9090"
    port = compose["x-environment"]["GRAFTREE_METRICS_LISTEN"].rpartition(":")[2]
    scrapes = yaml.safe_load((DEPLOY / "prometheus/prometheus.yml").read_text())["scrape_configs"]
    tiers = [scrape for scrape in scrapes if scrape["job_name"] != "prometheus"]
    assert {scrape["job_name"] for scrape in tiers} == {"router", "verifier", "speculator"}
    assert {str(scrape["dns_sd_configs"][0]["port"]) for scrape in tiers} == {port}


def test_prometheus_agrees() -> None:
    """Where Prometheus' own promtool is installed it checks the files and plays the alerts' test cases."""
    cases = ROOT / "tests/prometheus_alerts.yml"
    alerts = {
        case["alertname"] for test in yaml.safe_load(cases.read_text())["tests"] for case in test["alert_rule_test"]
    }
    assert alerts <= {rule["alert"] for group in ALERTS["groups"] for rule in group["rules"]}
    if (promtool := shutil.which("promtool")) is None:
        return
    for command in (
        ["check", "config", "prometheus.yml"],
        ["check", "rules", "alerts.yml"],
        ["test", "rules", str(cases)],
    ):
        done = subprocess.run([promtool, *command], cwd=DEPLOY / "prometheus", capture_output=True, text=True)
        assert done.returncode == 0, done.stdout + done.stderr
