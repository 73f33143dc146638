"""Ways of guessing: `base` is the interface, `loader` turns a spec into a drafter."""
