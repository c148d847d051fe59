"""Figures of the studies, drawn from records alone: one module a study, one function a panel. No torch."""
