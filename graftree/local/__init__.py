"""Tiers on this machine for `graftree.LocalStack`: as child processes, or as instances inside this process."""
