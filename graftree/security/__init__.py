"""TLS between the tiers, API keys at the edge, and secrets that come from files. See docs/security.md."""
