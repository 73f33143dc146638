"""What outlives a process: session records and the registry of pods, in Redis."""
