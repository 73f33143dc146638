"""The router tier: client streams, tokenizer, session life, tree merge and budget. No torch in its import graph."""
