"""What a pod tells about itself: metrics (Prometheus), traces (OpenTelemetry) and logs (structlog)."""
