"""Generated from protos/graftree/v1 by protos/generate.py."""
