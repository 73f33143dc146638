"""What every pod tells about itself, whichever tier it belongs to."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from graftree import __version__
from graftree.observe.exports import Export
from graftree.security.tls import expiries

if TYPE_CHECKING:
    from graftree.pod import Pod


def _info(pod: Pod[Any]) -> dict[tuple[str, ...], float]:
    record = pod.record()
    fingerprint = record.model_fingerprint[:12]
    return {(record.pod_id, record.tier, record.kind, record.address, fingerprint, __version__): 1.0}


EXPORTS: list[Export[Any]] = [
    Export(
        "graftree_pod_info",
        "gauge",
        "1; what this pod is. The fingerprint is its model's.",
        _info,
        labels=("pod_id", "tier", "kind", "address", "fingerprint", "version"),
    ),
    Export("graftree_pod_ready", "gauge", "1 while the pod takes work.", lambda pod: pod.ready),
    Export("graftree_pod_draining", "gauge", "1 while the pod is going away.", lambda pod: pod.draining),
    Export("graftree_pod_sessions", "gauge", "Sessions or requests open.", lambda pod: pod.record().sessions),
    Export("graftree_pod_max_sessions", "gauge", "Most of them; 0 = any.", lambda pod: pod.record().max_sessions),
    Export(
        "graftree_tls_certificate_not_after_seconds",
        "gauge",
        "End of a certificate's validity, in seconds since the epoch, by the side it is shown on.",
        lambda pod: expiries(pod.tls_sides),
        labels=("side",),
    ),
    Export(
        "graftree_tls_reload_failures_total",
        "counter",
        "Times that replaced TLS files could not be read; the ones before stay in force.",
        lambda pod: {(side,): tls.files.failures for side, tls in pod.tls_sides.items() if tls is not None},
        labels=("side",),
    ),
    Export(
        "graftree_pod_lease_renewals_total",
        "counter",
        "Times the pod registered or renewed its lease.",
        lambda pod: pod.lease_renewals,
    ),
    Export(
        "graftree_pod_lease_failures_total",
        "counter",
        "Times the pod could not register or renew its lease.",
        lambda pod: pod.lease_failures,
    ),
]
