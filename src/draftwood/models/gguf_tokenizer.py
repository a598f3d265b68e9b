"""The tokenizer of a GGUF file as the files that transformers loads.

Byte-level vocabularies whose way to split text is known are written directly: transformers takes
8 s for one of 151,936 tokens, and does not split digits for SmolLM2, so that "=  10" gets other
tokens than the model was trained on. All other vocabularies go through transformers.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, processors
from tokenizers.pre_tokenizers import ByteLevel, Digits, PreTokenizer, Sequence, Split

from draftwood.errors import ModelError
from draftwood.models.gguf_file import GgufFile
from draftwood.models.gguf_model import Metadata

_CONTROL, _USER_DEFINED = 3, 4  # in tokenizer.ggml.token_type

_QWEN2 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_LLAMA3 = _QWEN2.replace(r"|\p{N}|", r"|\p{N}{1,3}|")


def _split(pattern: str) -> PreTokenizer:
    cut = Split(Regex(pattern), behavior="isolated")
    return Sequence([cut, ByteLevel(add_prefix_space=False, use_regex=False)])


def _digits() -> PreTokenizer:
    return Sequence([Digits(individual_digits=True), ByteLevel(add_prefix_space=False)])


# tokenizer.ggml.pre -> how the original tokenizer splits text
_SPLITTERS: dict[str, Callable[[], PreTokenizer]] = {
    "gpt-2": lambda: ByteLevel(add_prefix_space=False),
    "smollm": _digits,
    "starcoder": _digits,
    "qwen2": lambda: _split(_QWEN2),
    "deepseek-r1-qwen": lambda: _split(_QWEN2),
    "llama-bpe": lambda: _split(_LLAMA3),
}
_NORMALIZED = {"qwen2", "deepseek-r1-qwen"}
_WHOLE_WORDS_FIRST = {"llama-bpe"}  # a word of the vocabulary is never built from merges


def write_tokenizer(file: GgufFile, folder: Path) -> None:
    """Write tokenizer.json and tokenizer_config.json, with the chat template, into `folder`.

    Raises ModelError if the file holds no tokenizer or one that cannot be built.
    """
    meta = Metadata(file)
    if not meta.items("tokenizer.ggml.tokens"):
        raise ModelError(f"{file.path} holds no tokenizer")
    try:
        if meta.text("tokenizer.ggml.pre", "") in _SPLITTERS:
            _write_byte_level(meta, folder)
        else:
            _write_by_transformers(file, folder)
    except ModelError:
        raise
    except Exception as error:  # tokenizers raises plain Exception for merges that do not fit
        raise ModelError(f"{file.path}: its tokenizer cannot be built: {error}") from error


def _write_byte_level(meta: Metadata, folder: Path) -> None:
    _byte_level(meta).save(str(folder / "tokenizer.json"))
    config = json.dumps(_config(meta), ensure_ascii=False, indent=2)
    (folder / "tokenizer_config.json").write_text(config + "\n", encoding="utf-8")


def _byte_level(meta: Metadata) -> Tokenizer:
    pre = meta.text("tokenizer.ggml.pre")
    tokens: list[str] = meta.items("tokenizer.ggml.tokens")
    merges = [tuple(merge.split(" ", 1)) for merge in meta.items("tokenizer.ggml.merges")]
    vocabulary = {token: index for index, token in enumerate(tokens)}
    tokenizer = Tokenizer(
        models.BPE(vocab=vocabulary, merges=merges, ignore_merges=pre in _WHOLE_WORDS_FIRST)
    )
    if pre in _NORMALIZED:
        tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = _SPLITTERS[pre]()
    tokenizer.decoder = decoders.ByteLevel()
    _add_special_tokens(tokenizer, tokens, meta.items("tokenizer.ggml.token_type"))
    tokenizer.post_processor = _post_processor(meta, tokens)
    return tokenizer


def _add_special_tokens(tokenizer: Tokenizer, tokens: list[str], kinds: list[int]) -> None:
    """Tokens matched whole in the text: control tokens, hidden in decoded text, and user tokens."""
    for special, kind in ((True, _CONTROL), (False, _USER_DEFINED)):
        added = [
            AddedToken(token, normalized=False, special=special)
            for token, token_kind in zip(tokens, kinds, strict=False)
            if token_kind == kind
        ]
        (tokenizer.add_special_tokens if special else tokenizer.add_tokens)(added)


def _post_processor(meta: Metadata, tokens: list[str]) -> Any:
    bos = meta.token_id("bos")
    default = meta.text("tokenizer.ggml.pre") == "llama-bpe"
    if bos is None or not meta.flag("tokenizer.ggml.add_bos_token", default):
        return processors.ByteLevel(trim_offsets=False)
    return processors.TemplateProcessing(
        single=[tokens[bos], "$A"],
        pair=[tokens[bos], "$A", "$B"],
        special_tokens=[(tokens[bos], bos)],
    )


def _config(meta: Metadata) -> dict[str, Any]:
    tokens = meta.items("tokenizer.ggml.tokens")
    roles = {"bos": "bos", "eos": "eos", "unk": "unknown", "pad": "padding"}
    ids = {f"{role}_token": meta.token_id(key) for role, key in roles.items()}
    config: dict[str, Any] = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "clean_up_tokenization_spaces": False,
        "model_max_length": meta.count("context_length"),
        **{name: tokens[index] for name, index in ids.items() if index is not None},
    }
    if template := meta.text("tokenizer.chat_template", ""):
        config["chat_template"] = template
    return config


def _write_by_transformers(file: GgufFile, folder: Path) -> None:
    from transformers import AutoTokenizer

    source = str(file.path.parent)
    tokenizer = AutoTokenizer.from_pretrained(source, gguf_file=file.path.name)
    tokenizer.save_pretrained(folder)
