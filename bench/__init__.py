"""The benchmark: the engine beside the tools that researchers use, in one process on one pair (`make bench`)."""

import kvnotes  # noqa: F401 (before torch, whose threads read the setting that it makes)
