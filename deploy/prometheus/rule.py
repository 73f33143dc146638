"""Prints deploy/prometheus/alerts.yml as the PrometheusRule that the Prometheus operator takes.

python deploy/prometheus/rule.py > deploy/kustomize/components/monitoring/alerts.yaml
"""

from __future__ import annotations

from pathlib import Path

import yaml

ALERTS = Path(__file__).with_name("alerts.yml")


def rule() -> str:
    """The object as YAML."""
    groups = yaml.safe_load(ALERTS.read_text())["groups"]
    whole = {
        "apiVersion": "monitoring.coreos.com/v1",
        "kind": "PrometheusRule",
        "metadata": {"name": "graftree"},
        "spec": {"groups": groups},
    }
    return "# Made by deploy/prometheus/rule.py\n" + yaml.safe_dump(whole, sort_keys=False, width=118)


if __name__ == "__main__":
    print(rule(), end="")
