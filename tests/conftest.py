import os

# Tests compare numbers to 1e-4 and run beside each other: one thread each, and no hub.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")

from jaxtyping import install_import_hook

# Shapes in annotations are checked at every call, before any test imports these modules.
CHECKED = ("cache", "forward", "readout", "models", "interventions", "rows", "hooks", "sweep")
install_import_hook([f"kvnotes.{name}" for name in CHECKED], "beartype.beartype")
