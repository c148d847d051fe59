"""kvnotes: where a language model stores a decision in its KV cache, what writes it and what reads it."""

__version__ = "0.1.0"
