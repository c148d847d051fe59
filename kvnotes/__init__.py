"""kvnotes: where a language model stores a decision in its KV cache, what writes it and what reads it."""

import os

__version__ = "0.1.0"

# Read once, when torch starts its threads. Waiting threads that spin for long make every matrix product several times
# slower as soon as anything else runs on the machine; those that never spin wake up late for every small operation. So
# they spin for a few microseconds (LOG.md, 2026-11-30).
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
os.environ.setdefault("GOMP_SPINCOUNT", "2000")
