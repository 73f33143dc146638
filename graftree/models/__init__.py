"""Models: their URIs, the cache, loading, and the runner that forwards trees. Only some modules need torch."""
