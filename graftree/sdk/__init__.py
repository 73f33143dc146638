"""What a caller hands to `graftree.client` and gets back, as plain frozen values."""
