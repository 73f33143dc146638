"""Makes an SSM for an LLM: the LLM writes, the SSM learns to say the same.

streams.py      turns of a dialogue as one token stream, and who says what
writer.py       many streams at once through the LLM, with its top log probabilities
corpus.py       what was written, in shards on disk
student.py      the SSM while it learns
trainer.py      epochs over the corpus, held-out measures
assignment.py   what a student is and learns from; a checkpoint belongs to one
checkpoint.py   a training run's state in one file
files.py        tensors in a file, whole or not at all
card.py         the finished package
run.py          all of it: write, train, package
boost.py        several SSMs, each taught what those before it do not get
"""
