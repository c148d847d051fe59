"""Tiny GGUF files and wheels for tests: real formats, a few kilobytes."""

from __future__ import annotations

import base64
import hashlib
import zipfile
from pathlib import Path

import gguf
import numpy as np

from kvnotes.sources import GGUFFile, Wheel
from tests.reference_bpe import byte_alphabet

D_MODEL, HEADS, KV_HEADS, D_FF = 32, 4, 2, 64
NORMAL, UNKNOWN, CONTROL, USER_DEFINED, BYTE = 1, 2, 3, 4, 6


def byte_level_vocabulary() -> tuple[list[str], list[int], list[str]]:
    """Tokens, types and merges: three control tokens, the 256 bytes, and some merges that compete."""
    merges = ["Ġ t", "a a", "h e", "aa aa", "Ġt he", "e r", "Ġ Ġ", "a b", "' s", "Ċ Ċ", "Ã ©", "ĠĠ ĠĠ"]
    merges += ["1 2", "- -"]
    control = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
    tokens = [*control, *byte_alphabet().values(), *("".join(merge.split(" ")) for merge in merges), "<tool>"]
    types = [CONTROL] * 3 + [NORMAL] * (len(tokens) - 4) + [USER_DEFINED]
    return tokens, types, merges


def sentencepiece_vocabulary() -> tuple[list[str], list[int], list[float]]:
    """Tokens, types and scores: pad, eos, bos, unk, byte tokens, user-defined runs, pieces by score."""
    pieces = ["▁t", "aa", "he", "aaaa", "▁the", "aaa", "er", "ab", "'s", "éa", "aab", "12", "--", "▁a"]
    letters = [*"▁abcdefghijklmnopqrstuvwxyz'-,.|{}<>_=\\XYZ0129", "é", "中", "あ", "ß"]
    tokens = ["<pad>", "<eos>", "<bos>", "<unk>", *(f"<0x{byte:02X}>" for byte in range(256))]
    types = [CONTROL] * 3 + [UNKNOWN] + [BYTE] * 256
    user = ["\n", "\n\n", "  ", "    ", "<b>"]
    normal = [*pieces, *letters]
    scores = [-1000.0] * 4 + [0.0] * (256 + len(user)) + [-float(rank) for rank in range(len(normal))]
    kinds = [USER_DEFINED] * len(user) + [NORMAL] * len(normal)
    return [*tokens, *user, *normal], types + kinds, scores


def write_llama(path: Path, *, kind: str = "gpt2", seed: int = 0) -> dict[str, np.ndarray]:
    """A one-layer Llama of random weights, one tensor in Q8_0; returns the float32 tensors by GGUF name."""
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_block_count(1)
    writer.add_context_length(128)
    writer.add_embedding_length(D_MODEL)
    writer.add_feed_forward_length(D_FF)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KV_HEADS)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_freq_base(10000.0)
    vocabulary = _add_tokenizer(writer, kind)
    tensors = _tensors(vocabulary, np.random.default_rng(seed))
    for name, values in tensors.items():
        if name == "blk.0.ffn_up.weight":
            packed = gguf.quantize(values, gguf.GGMLQuantizationType.Q8_0)
            writer.add_tensor(name, packed, raw_dtype=gguf.GGMLQuantizationType.Q8_0)
            tensors[name] = gguf.dequantize(packed, gguf.GGMLQuantizationType.Q8_0)
        else:
            writer.add_tensor(name, values)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return tensors


def _add_tokenizer(writer: gguf.GGUFWriter, kind: str) -> int:
    writer.add_tokenizer_model(kind)
    if kind == "gpt2":
        tokens, types, merges = byte_level_vocabulary()
        writer.add_tokenizer_pre("smollm")
        writer.add_token_merges(merges)
        writer.add_chat_template("{% for m in messages %}<|im_start|>{{ m.content }}<|im_end|>{% endfor %}")
        bos, eos = 1, 2
    else:
        tokens, types, scores = sentencepiece_vocabulary()
        writer.add_token_scores(scores)
        writer.add_add_space_prefix(False)
        writer.add_add_bos_token(True)
        writer.add_unk_token_id(3)
        bos, eos = 2, 1
    writer.add_token_list(tokens)
    writer.add_token_types(types)
    writer.add_bos_token_id(bos)
    writer.add_eos_token_id(eos)
    writer.add_pad_token_id(0)
    return len(tokens)


def _tensors(vocabulary: int, random: np.random.Generator) -> dict[str, np.ndarray]:
    kv = D_MODEL // HEADS * KV_HEADS
    shapes = {
        "token_embd.weight": (vocabulary, D_MODEL),
        "output_norm.weight": (D_MODEL,),
        "blk.0.attn_norm.weight": (D_MODEL,),
        "blk.0.attn_q.weight": (D_MODEL, D_MODEL),
        "blk.0.attn_k.weight": (kv, D_MODEL),
        "blk.0.attn_v.weight": (kv, D_MODEL),
        "blk.0.attn_output.weight": (D_MODEL, D_MODEL),
        "blk.0.ffn_norm.weight": (D_MODEL,),
        "blk.0.ffn_gate.weight": (D_FF, D_MODEL),
        "blk.0.ffn_up.weight": (D_FF, D_MODEL),
        "blk.0.ffn_down.weight": (D_MODEL, D_FF),
    }
    return {name: random.standard_normal(shape).astype(np.float32) for name, shape in shapes.items()}


def write_wheel(folder: Path, *, package: str, member: str, content: bytes) -> Wheel:
    """A wheel that pip accepts, with `content` as one member; returns its registry line."""
    name = package.replace("-", "_")
    path = folder / f"{name}-1.0.0-py3-none-any.whl"
    info = f"{name}-1.0.0.dist-info"
    files = {
        member: content,
        f"{info}/METADATA": f"Metadata-Version: 2.1\nName: {package}\nVersion: 1.0.0\n".encode(),
        f"{info}/WHEEL": b"Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
    }
    lines = []
    for file, data in files.items():
        digest = base64.urlsafe_b64encode(hashlib.sha256(data).digest()).rstrip(b"=").decode()
        lines.append(f"{file},sha256={digest},{len(data)}")
    files[f"{info}/RECORD"] = "\n".join([*lines, f"{info}/RECORD,,"]).encode() + b"\n"
    with zipfile.ZipFile(path, "w") as archive:
        for file, data in files.items():
            archive.writestr(file, data)
    digest = hashlib.sha256(path.read_bytes()).hexdigest()
    return Wheel(package=package, version="1.0.0", wheel_sha256=digest, member=member)


def in_wheels(folder: Path, content: bytes, *, parts: int = 2, hub_repo: str | None = None) -> GGUFFile:
    """A GGUF's registry entry, with the file cut into wheels that lie in `folder`."""
    folder.mkdir(exist_ok=True)
    size = -(-len(content) // parts)
    wheels = [
        write_wheel(
            folder,
            package=f"kvnotes-tiny-part{number + 1}",
            member=f"kvnotes_tiny/data/part{number}.bin",
            content=content[number * size : (number + 1) * size],
        )
        for number in range(parts)
    ]
    return GGUFFile(
        file="tiny.gguf",
        bytes=len(content),
        sha256=hashlib.sha256(content).hexdigest(),
        hub_repo=hub_repo,
        wheels=tuple(wheels),
    )
