"""Ask a pod of this container how it is: `probe.py PORT [SERVICE]`, exit code 0 if it serves.

The empty service name is liveness, "readiness" says whether it takes work. For engines that probe by a command;
Kubernetes speaks gRPC health itself.
"""

from __future__ import annotations

import sys

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

SECONDS = 3.0


def main(port: str, service: str = "") -> int:
    """0 where the health service answers SERVING, else 1."""
    with grpc.insecure_channel(f"127.0.0.1:{port}") as channel:
        request = health_pb2.HealthCheckRequest(service=service)
        try:
            status = health_pb2_grpc.HealthStub(channel).Check(request, timeout=SECONDS).status
        except grpc.RpcError as error:
            print(error.code().name)  # type: ignore[attr-defined]
            return 1
    print(health_pb2.HealthCheckResponse.ServingStatus.Name(status))
    return 0 if status == health_pb2.HealthCheckResponse.SERVING else 1


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
