"""Benchmarks: `python -m bench.NAME [--quick] [--json FILE]` prints a table of figures with their targets."""
