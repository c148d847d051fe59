"""Tiny random-weight checkpoints, one an architecture, with a word-level tokenizer: saved as any model is."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import transformers
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import WhitespaceSplit
from transformers import PreTrainedTokenizerFast

WORDS = """the state is open shut . if then allow deny ; answer : now what to do rule filler calm""".split()  # noqa: SIM905
SHAPE = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 4,
    "max_position_embeddings": 512,
    "head_dim": 8,
    "initializer_range": 0.35,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "pad_token_id": 1,
}
WINDOW = 8
KINDS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("Llama", {}),
    "qwen2": ("Qwen2", {}),
    "qwen3": ("Qwen3", {}),
    "mistral": ("Mistral", {"sliding_window": WINDOW}),
    "gemma2": (
        "Gemma2",
        {
            "sliding_window": WINDOW,
            "query_pre_attn_scalar": 8,
            "attn_logit_softcapping": 2.0,
            "final_logit_softcapping": 5.0,
        },
    ),
    "gemma3": (
        "Gemma3Text",
        {
            "sliding_window": WINDOW,
            "query_pre_attn_scalar": 8,
            "layer_types": ["sliding_attention", "sliding_attention", "full_attention", "sliding_attention"],
        },
    ),
    "mixtral": ("Mixtral", {"num_local_experts": 4, "sliding_window": None}),
}
ROPE: dict[str, dict[str, Any]] = {
    "llama3": {
        "rope_type": "llama3",
        "rope_theta": 10_000.0,
        "factor": 4.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 64,
    },
    "linear": {"rope_type": "linear", "rope_theta": 10_000.0, "factor": 2.0},
    "yarn": {
        "rope_type": "yarn",
        "rope_theta": 10_000.0,
        "factor": 4.0,
        "original_max_position_embeddings": 64,
    },
    "dynamic": {"rope_type": "dynamic", "rope_theta": 10_000.0, "factor": 4.0},
}


def checkpoint(kind: str, folder: Path, *, heads: int = 4, kv_heads: int = 2, **extra: Any) -> Path:
    """Write a seeded random checkpoint of an architecture; `extra` goes to its config."""
    torch.manual_seed(0)
    name, own = KINDS[kind]
    settings = {**SHAPE, **own, "num_attention_heads": heads, "num_key_value_heads": kv_heads, **extra}
    config = getattr(transformers, f"{name}Config")(**settings)
    model = getattr(transformers, f"{name.removesuffix('Text')}ForCausalLM")(config)
    model.save_pretrained(folder)
    tokenizer().save_pretrained(folder)
    return folder


def tokenizer() -> PreTrainedTokenizerFast:
    """A word-level tokenizer with a BOS that it does not add by itself."""
    vocab = {word: i for i, word in enumerate(["<s>", "</s>", "<unk>", *WORDS])}
    raw = Tokenizer(WordLevel(vocab, unk_token="<unk>"))
    raw.pre_tokenizer = WhitespaceSplit()
    return PreTrainedTokenizerFast(
        tokenizer_object=raw, bos_token="<s>", eos_token="</s>", unk_token="<unk>", pad_token="</s>"
    )
