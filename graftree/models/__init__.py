"""Models: where they come from, how they are loaded, and the runner that steps them."""

import os

# Several pods on few cores is the usual case on a CPU, and an OpenMP thread that spins at a barrier takes the core
# another pod's thread needs: steps were seen to slow down tenfold. Read once, when torch is first imported.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
# But a thread that sleeps at every one of a step's few hundred barriers costs a quarter of the step: some
# microseconds are spun away first.
os.environ.setdefault("GOMP_SPINCOUNT", "10000")
