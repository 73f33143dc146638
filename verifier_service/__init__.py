"""The verifier tier: the LLM, its paged KV, the batch schedule and acceptance."""
