"""Makes an SSM for an LLM: the LLM writes, the SSM learns to say the same.

streams.py   turns of a dialogue as one token stream, and who says what
writer.py    many streams at once through the LLM, with its top log probabilities
corpus.py    what was written, in shards on disk
student.py   the SSM while it learns
trainer.py   epochs over the corpus, checkpoints, held-out measures
card.py      what a reader of the finished SSM must know
run.py       all of it: write, train, package
"""
