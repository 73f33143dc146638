"""gRPC plumbing the tiers share: servers with health and reflection, rich errors, batching with credits."""
