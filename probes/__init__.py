"""Token-level causal probes: one file a study, run by `make probe-<name>`."""
