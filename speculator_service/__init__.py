"""The speculator tier: one drafter, one living tree per session."""
