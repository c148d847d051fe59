"""A GGUF file -> an ordinary Hugging Face folder: config, float32 safetensors and tokenizer. No torch.

Tensors are dequantised a block of rows at a time, so a 6 GB model needs little memory. The tokenizer is built
from the GGUF's own tokens, merges and scores. The GGUF names only a pre-tokenizer; its pattern is llama.cpp's
(src/llama-vocab.cpp), and like llama.cpp no Unicode normalisation is applied.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO, cast

import numpy as np
from rich.progress import Progress

from kvnotes.sources import WeightsError, require_space

if TYPE_CHECKING:
    from gguf import GGUFReader, ReaderTensor
    from tokenizers import Tokenizer

CONVERTER_VERSION = 1  # of what `convert` writes: a cached folder of another version is converted again
BLOCK_ELEMENTS = 1 << 24

# The token types of a GGUF vocabulary that matter here (gguf.TokenType).
NORMAL, CONTROL, USER_DEFINED = 1, 3, 4

TOP_NAMES = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
LAYER_NAMES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
GEMMA3_LAYER_NAMES = LAYER_NAMES | {
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "post_attention_norm": "post_attention_layernorm",
    "ffn_norm": "pre_feedforward_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}

QWEN2_SPLIT = (
    r"(?:'[sS]|'[tT]|'[rR][eE]|'[vV][eE]|'[mM]|'[lL][lL]|'[dD])|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
GPT2_SPLIT = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
SPLITS = {"qwen2": (QWEN2_SPLIT,), "smollm": (r"\p{N}", GPT2_SPLIT)}


@dataclass(frozen=True, kw_only=True)
class Architecture:
    """How one GGUF architecture maps to Hugging Face: names, config, and what was changed in the tensors."""

    layer_names: dict[str, str]
    biases: tuple[str, ...]  # GGUF tensors of a layer that have a bias
    config: Callable[[Metadata], dict[str, Any]]
    permuted: bool = False  # q and k rows stand in llama.cpp's interleaved order
    norm_plus_one: bool = False  # norm weights are stored as 1 + weight


class Metadata:
    """A GGUF file's key-value pairs; a missing key is a `WeightsError` that names it."""

    def __init__(self, reader: GGUFReader) -> None:
        """Read the pairs of an open file."""
        self._fields = reader.fields
        self.architecture = str(self["general.architecture"])

    def __getitem__(self, key: str) -> Any:
        """The value of a key that the file must have."""
        if key not in self._fields:
            raise WeightsError(f"the GGUF has no {key!r}, so it cannot be converted; use a complete GGUF file.")
        return self._fields[key].contents()

    def get(self, key: str, default: Any = None) -> Any:
        """The value of a key, or `default` where the file has none."""
        return self[key] if key in self._fields else default

    def of_model(self, key: str) -> Any:
        """The value of an architecture's own key, such as `block_count`."""
        return self[f"{self.architecture}.{key}"]


def convert(gguf_file: Path, folder: Path, *, progress: Progress) -> None:
    """Write config.json, model.safetensors (float32), tokenizer.json and tokenizer_config.json to `folder`.

    Raises `WeightsError` for an unreadable or truncated file, an architecture or a tokenizer that is not
    supported, and tensors that do not fit the architecture.
    """
    reader = _open(gguf_file)
    metadata = Metadata(reader)
    if metadata.architecture not in ARCHITECTURES:
        raise WeightsError(
            f"{gguf_file.name} has the architecture {metadata.architecture!r}; this converter knows "
            f"{', '.join(ARCHITECTURES)}. Use the model's safetensors repository instead (MODEL=<hub id>)."
        )
    architecture = ARCHITECTURES[metadata.architecture]
    names = _tensor_names(reader, metadata, architecture)
    config = _shared_config(metadata) | architecture.config(metadata)
    config["tie_word_embeddings"] = "output.weight" not in names
    _write_json(folder / "config.json", config)
    _write_weights(folder / "model.safetensors", reader, names, metadata, progress)
    task = progress.add_task(f"{gguf_file.name}: tokenizer", total=None)
    build_tokenizer(metadata).save(str(folder / "tokenizer.json"), pretty=False)
    _write_json(folder / "tokenizer_config.json", _tokenizer_config(metadata))
    progress.update(task, total=1, completed=1)


def _open(path: Path) -> GGUFReader:
    from gguf import GGUFReader  # in the models extra

    try:
        return GGUFReader(path)
    except (ValueError, IndexError, KeyError, OverflowError) as error:
        raise WeightsError(
            f"{path.name} is not a readable GGUF file ({error}): it is truncated or damaged. Remove {path} "
            "and run again to bring it anew."
        ) from error


def _write_json(path: Path, value: dict[str, Any]) -> None:
    path.write_text(json.dumps(value, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


# --- config ------------------------------------------------------------------------------------------------


def _shared_config(metadata: Metadata) -> dict[str, Any]:
    """The keys that every supported architecture's config has."""
    hidden, heads = metadata.of_model("embedding_length"), metadata.of_model("attention.head_count")
    return {
        "dtype": "float32",
        "transformers_version": version("transformers"),
        "vocab_size": len(metadata["tokenizer.ggml.tokens"]),
        "hidden_size": hidden,
        "intermediate_size": metadata.of_model("feed_forward_length"),
        "num_hidden_layers": metadata.of_model("block_count"),
        "num_attention_heads": heads,
        "num_key_value_heads": metadata.of_model("attention.head_count_kv"),
        "head_dim": metadata.get(f"{metadata.architecture}.attention.key_length", hidden // heads),
        "max_position_embeddings": metadata.of_model("context_length"),
        # The publishers' value; the GGUF stores it as a float32 (9.99999997e-07).
        "rms_norm_eps": float(f"{metadata.of_model('attention.layer_norm_rms_epsilon'):.6g}"),
        "bos_token_id": metadata.get("tokenizer.ggml.bos_token_id"),
        "eos_token_id": metadata["tokenizer.ggml.eos_token_id"],
        "pad_token_id": metadata.get("tokenizer.ggml.padding_token_id"),
    }


def _rope(theta: float) -> dict[str, Any]:
    return {"rope_type": "default", "rope_theta": theta}


def _qwen2_config(metadata: Metadata) -> dict[str, Any]:
    return {
        "architectures": ["Qwen2ForCausalLM"],
        "model_type": "qwen2",
        "hidden_act": "silu",
        "use_sliding_window": False,
        "rope_parameters": _rope(metadata.of_model("rope.freq_base")),
    }


def _llama_config(metadata: Metadata) -> dict[str, Any]:
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_act": "silu",
        "attention_bias": False,
        "mlp_bias": False,
        "rope_parameters": _rope(metadata.of_model("rope.freq_base")),
    }


def _gemma3_config(metadata: Metadata) -> dict[str, Any]:
    """The GGUF leaves out what llama.cpp fixes for the architecture: every sixth layer attends to everything,
    the others within the window with a RoPE base of 10,000, and scores scale by the head dimension."""
    layers = metadata.of_model("block_count")
    kinds = ["full_attention" if layer % 6 == 5 else "sliding_attention" for layer in range(layers)]
    return {
        "architectures": ["Gemma3ForCausalLM"],
        "model_type": "gemma3_text",
        "hidden_activation": "gelu_pytorch_tanh",
        "attention_bias": False,
        "query_pre_attn_scalar": metadata.of_model("attention.key_length"),
        "sliding_window": metadata.of_model("attention.sliding_window"),
        "layer_types": kinds,
        "rope_parameters": {
            "full_attention": _rope(metadata.of_model("rope.freq_base")),
            "sliding_attention": _rope(10000.0),
        },
    }


ARCHITECTURES = {
    "qwen2": Architecture(layer_names=LAYER_NAMES, biases=("attn_q", "attn_k", "attn_v"), config=_qwen2_config),
    "llama": Architecture(layer_names=LAYER_NAMES, biases=(), config=_llama_config, permuted=True),
    "gemma3": Architecture(layer_names=GEMMA3_LAYER_NAMES, biases=(), config=_gemma3_config, norm_plus_one=True),
}


# --- tensors -----------------------------------------------------------------------------------------------


def _tensor_names(reader: GGUFReader, metadata: Metadata, architecture: Architecture) -> dict[str, str]:
    """GGUF name -> Hugging Face name, for exactly the tensors that the architecture has."""
    names = {f"{old}.weight": f"{new}.weight" for old, new in TOP_NAMES.items()}
    for layer in range(metadata.of_model("block_count")):
        for old, new in architecture.layer_names.items():
            kinds = ("weight", "bias") if old in architecture.biases else ("weight",)
            names |= {f"blk.{layer}.{old}.{kind}": f"model.layers.{layer}.{new}.{kind}" for kind in kinds}
    found = {tensor.name for tensor in reader.tensors}
    if "output.weight" not in found:  # tied to the embedding
        del names["output.weight"]
    if wrong := found ^ set(names):
        raise WeightsError(
            f"the GGUF's tensors do not fit the architecture {metadata.architecture!r}; unknown or missing: "
            f"{', '.join(sorted(wrong)[:5])}. Use the publisher's own file."
        )
    return names


def _write_weights(
    path: Path, reader: GGUFReader, names: dict[str, str], metadata: Metadata, progress: Progress
) -> None:
    """Stream every tensor as float32 into one safetensors file."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    offset = 0
    for tensor in reader.tensors:
        size = 4 * int(tensor.n_elements)
        shape = [int(n) for n in reversed(tensor.shape)]
        header[names[tensor.name]] = {
            "dtype": "F32",
            "shape": shape,
            "data_offsets": [offset, offset + size],
        }
        offset += size
    require_space(path.parent, offset, "the dequantised weights")
    task = progress.add_task("dequantising to float32", total=offset)
    with path.open("wb") as out:
        _write_header(out, header)
        for tensor in reader.tensors:
            for block in _float32_blocks(tensor, metadata):
                out.write(block.tobytes())
                progress.advance(task, block.nbytes)


def _write_header(out: BinaryIO, header: dict[str, Any]) -> None:
    """The safetensors header: its length as 8 bytes, then JSON padded so that the data starts at a multiple
    of 8 (https://huggingface.co/docs/safetensors)."""
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    out.write(struct.pack("<Q", len(text)) + text)


def _float32_blocks(tensor: ReaderTensor, metadata: Metadata) -> Iterator[np.ndarray]:
    """A tensor's rows in float32, in the order and convention of the Hugging Face model."""
    from gguf import dequantize

    architecture = ARCHITECTURES[metadata.architecture]
    kind = tensor.name.split(".")[-2]
    if architecture.permuted and kind in ("attn_q", "attn_k"):
        count = "head_count" if kind == "attn_q" else "head_count_kv"
        weights = dequantize(tensor.data, tensor.tensor_type)
        yield _rotate_half_order(weights, heads=metadata.of_model(f"attention.{count}"))
        return
    rows = max(1, BLOCK_ELEMENTS // int(tensor.shape[0]))
    for start in range(0, len(tensor.data), rows):
        block = dequantize(tensor.data[start : start + rows], tensor.tensor_type)
        if architecture.norm_plus_one and kind.endswith("norm"):
            block = block - np.float32(1)
        yield np.ascontiguousarray(block, dtype=np.float32)


def _rotate_half_order(weights: np.ndarray, *, heads: int) -> np.ndarray:
    """Undo llama.cpp's row order. It rotates neighbouring rows (2i, 2i+1) of a head, Hugging Face rows i and
    i + d_head/2. Weights are [heads * d_head, d_model]."""
    half = weights.shape[0] // heads // 2
    paired = weights.reshape(heads, half, 2, *weights.shape[1:])
    return np.ascontiguousarray(paired.swapaxes(1, 2).reshape(weights.shape))


# --- tokenizer ---------------------------------------------------------------------------------------------


def build_tokenizer(metadata: Metadata) -> Tokenizer:
    """The GGUF's tokenizer, its ids unchanged, as a `tokenizers.Tokenizer`.

    Control and user-defined tokens are matched in the raw text before anything else, as llama.cpp does when
    it parses special tokens. Raises `WeightsError` for a tokenizer kind or pre-tokenizer that is not known.
    """
    from tokenizers import AddedToken

    kind = metadata["tokenizer.ggml.model"]
    builders = {"gpt2": _byte_level_tokenizer, "llama": _sentencepiece_tokenizer}
    if kind not in builders:
        raise WeightsError(f"tokenizer kind {kind!r} is not supported; known: {', '.join(builders)}.")
    tokenizer = builders[kind](metadata)
    tokens = metadata["tokenizer.ggml.tokens"]
    types = metadata["tokenizer.ggml.token_type"]
    added = [
        AddedToken(token, special=type_ == CONTROL, normalized=False)
        for token, type_ in zip(tokens, types, strict=True)
        if type_ in (CONTROL, USER_DEFINED)
    ]
    tokenizer.add_tokens(added)
    if tokenizer.get_vocab_size() != len(tokens):
        raise WeightsError("the GGUF's vocabulary has repeated tokens, so its ids cannot be kept; use another file.")
    if metadata.get("tokenizer.ggml.add_bos_token", False):
        _prepend_bos(tokenizer, tokens[metadata["tokenizer.ggml.bos_token_id"]])
    return tokenizer


def _byte_level_tokenizer(metadata: Metadata) -> Tokenizer:
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers

    pre = metadata["tokenizer.ggml.pre"]
    if pre not in SPLITS:
        raise WeightsError(f"pre-tokenizer {pre!r} is not supported; known: {', '.join(SPLITS)}.")
    merges = [cast("tuple[str, str]", tuple(m.split(" "))) for m in metadata["tokenizer.ggml.merges"]]
    tokenizer = Tokenizer(models.BPE(vocab=_vocabulary(metadata), merges=merges))
    splits = [pre_tokenizers.Split(Regex(pattern), "isolated") for pattern in SPLITS[pre]]
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([*splits, byte_level])
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def _sentencepiece_tokenizer(metadata: Metadata) -> Tokenizer:
    from tokenizers import Tokenizer, decoders, models, normalizers

    if metadata.get("tokenizer.ggml.add_space_prefix", True):
        raise WeightsError("a tokenizer that puts a space before the text is not supported; use another file.")
    tokens = metadata["tokenizer.ggml.tokens"]
    unknown = tokens[metadata["tokenizer.ggml.unknown_token_id"]]
    tokenizer = Tokenizer(
        models.BPE(
            vocab=_vocabulary(metadata),
            merges=_merges_from_scores(metadata),
            byte_fallback=True,
            fuse_unk=True,
            unk_token=unknown,
        )
    )
    tokenizer.normalizer = normalizers.Replace(" ", "▁")
    tokenizer.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])
    return tokenizer


def _vocabulary(metadata: Metadata) -> dict[str, int]:
    return {token: index for index, token in enumerate(metadata["tokenizer.ggml.tokens"])}


def _merges_from_scores(metadata: Metadata) -> list[tuple[str, str]]:
    """SentencePiece merges whichever neighbours form the best-scored token, so every split of a token into
    two tokens is a merge, and the merges are ranked by the score of what they form."""
    rows = zip(
        metadata["tokenizer.ggml.tokens"],
        metadata["tokenizer.ggml.scores"],
        metadata["tokenizer.ggml.token_type"],
        strict=True,
    )
    scores = {token: score for token, score, type_ in rows if type_ == NORMAL}
    ranked = sorted(scores, key=lambda token: -scores[token])
    return [
        (token[:cut], token[cut:])
        for token in ranked
        for cut in range(1, len(token))
        if token[:cut] in scores and token[cut:] in scores
    ]


def _prepend_bos(tokenizer: Tokenizer, bos: str) -> None:
    from tokenizers import processors

    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{bos} $A", pair=f"{bos} $A {bos} $B", special_tokens=[(bos, tokenizer.token_to_id(bos))]
    )


def _tokenizer_config(metadata: Metadata) -> dict[str, Any]:
    """What transformers needs beside tokenizer.json: the special tokens by name and the chat template.

    Whether BOS is added is in tokenizer.json; transformers 5 ignores `add_bos_token` where that file exists.
    """
    tokens = metadata["tokenizer.ggml.tokens"]
    special = {"bos": "bos", "eos": "eos", "pad": "padding", "unk": "unknown"}
    config: dict[str, Any] = {
        "tokenizer_class": "TokenizersBackend",  # PreTrainedTokenizerFast's name since transformers 5
        "clean_up_tokenization_spaces": False,
        "model_max_length": metadata.of_model("context_length"),
    }
    for name, key in special.items():
        index = metadata.get(f"tokenizer.ggml.{key}_token_id")
        if index is not None:
            config[f"{name}_token"] = tokens[index]
    if template := metadata.get("tokenizer.chat_template"):
        config["chat_template"] = template
    return config
