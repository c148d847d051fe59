"""Component-level studies: one file a study, run by `make probe-<name>`."""
