"""The tokenizer of a GGUF file: same tokens, same template, as the model was trained with."""

from __future__ import annotations

from pathlib import Path

import pytest
from transformers import AutoTokenizer

from draftwood.models.gguf_convert import convert
from tests.tiny_gguf import TEMPLATE, TOKENS, write_gguf

pytestmark = pytest.mark.usefixtures("root")


def converted(path: Path, root: Path) -> Path:
    return convert(path, root / "models" / "made", "tiny")


def test_tokenizer_survives(tmp_path: Path, root: Path) -> None:
    """The chat template or the special tokens were lost, or control tokens were cut in pieces."""
    folder = converted(write_gguf(tmp_path / "tiny.gguf"), root)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    assert tokenizer.get_vocab() == {token: i for i, token in enumerate(TOKENS)}
    assert (tokenizer.bos_token_id, tokenizer.eos_token_id, tokenizer.pad_token_id) == (1, 2, 0)
    message = [{"role": "user", "content": "hell"}]
    assert tokenizer.apply_chat_template(message, tokenize=False) == "<|im_start|>hell<|im_end|>"
    text = "<|im_start|>hell<think>é 🙂<|im_end|>"
    ids = tokenizer(text).input_ids
    assert ids[:3] == [1, TOKENS.index("hell"), TOKENS.index("<think>")]
    assert tokenizer.decode(ids) == text
    assert tokenizer.decode(ids, skip_special_tokens=True) == "hell<think>é 🙂"


@pytest.mark.parametrize(
    ("pre", "pieces"),
    [("smollm", ["ĠĠ", "1"]), ("gpt-2", ["Ġ", "Ġ1"]), ("qwen2", ["Ġ", "Ġ", "1"])],
)
def test_text_is_split_as_the_model_learned_it(
    tmp_path: Path, root: Path, pre: str, pieces: list[str]
) -> None:
    """transformers does not know "smollm" and takes GPT-2's way: "=  10" got tokens that the
    model never saw in training."""
    folder = converted(write_gguf(tmp_path / "tiny.gguf", pre=pre), root)
    assert AutoTokenizer.from_pretrained(folder).tokenize("  1") == pieces


def test_bos_is_added_where_the_file_says_so(tmp_path: Path, root: Path) -> None:
    """Llama 3 without its first token answers worse, and nothing fails."""
    path = write_gguf(tmp_path / "tiny.gguf", edit=lambda writer, _: writer.add_add_bos_token(True))
    tokenizer = AutoTokenizer.from_pretrained(converted(path, root))
    assert tokenizer("he").input_ids == [1, TOKENS.index("he")]
    assert tokenizer("he", add_special_tokens=False).input_ids == [TOKENS.index("he")]


def test_unknown_way_to_split_goes_through_transformers(tmp_path: Path, root: Path) -> None:
    """A vocabulary that we do not write ourselves had no tokenizer at all."""
    folder = converted(write_gguf(tmp_path / "tiny.gguf", pre="default"), root)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    assert tokenizer("hell").input_ids == [TOKENS.index("hell")]
    assert tokenizer.chat_template == TEMPLATE
