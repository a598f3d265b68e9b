"""Tokenizers that differ, and models that know a text in the words of their own tokenizer.

bpe_tokenizer(), metaspace_tokenizer()      trained here, real, with special tokens
letters_tokenizer(32)                       `LetterTokenizer`'s vocabulary as a real one
foreign_drafter("text", letters_tokenizer(32), model, ...)
knowing_model(tokenizer, text)              a toy that continues the text, whoever cut it
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import tokenizers
import transformers as tf
from tokenizers import decoders, models, normalizers, pre_tokenizers, processors, trainers

from draftwood.draft.foreign import ForeignDrafter, Match
from draftwood.draft.vocabulary import Bridge
from draftwood.kv import BlockPool
from draftwood.models.base import Model
from draftwood.text import Speller, Tokenizer
from tests.tiny import CORPUS, bpe_backend, hf_model
from tests.toys import History, ToyModel

BOS, EOS = "<s>", "</s>"


_NAMES = ["<unk>", BOS, EOS, *(f"<0x{byte:02X}>" for byte in range(256))]


@lru_cache(maxsize=4)
def metaspace_backend(*, unigram: bool = False) -> Any:
    """SentencePiece's way: spaces are letters, one stands in front, bytes where letters end."""
    inner = _unigram() if unigram else _llama_bpe()
    inner.add_special_tokens(_NAMES[:3])
    inner.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip()]
    )
    inner.post_processor = processors.TemplateProcessing(
        single=f"{BOS} $A", special_tokens=[(BOS, inner.token_to_id(BOS))]
    )
    return tf.PreTrainedTokenizerFast(
        tokenizer_object=inner, bos_token=BOS, eos_token=EOS, unk_token="<unk>"
    )


def _trained(model: Any, trainer: Any) -> Any:
    inner = tokenizers.Tokenizer(model)
    inner.pre_tokenizer = pre_tokenizers.Metaspace()
    inner.train_from_iterator(CORPUS[:3] * 4, trainer)
    return inner


def _llama_bpe() -> Any:
    """As Llama 2 has it: a normalizer writes the spaces, and nothing cuts words."""
    trainer = trainers.BpeTrainer(vocab_size=80, show_progress=False)
    learned = json.loads(_trained(models.BPE(), trainer).to_str())["model"]
    words = {word: i for i, word in enumerate([*_NAMES, *learned["vocab"]])}
    merges = [tuple(pair) for pair in learned["merges"]]
    inner = tokenizers.Tokenizer(models.BPE(words, merges, byte_fallback=True, unk_token="<unk>"))
    inner.normalizer = normalizers.Sequence(
        [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
    )
    return inner


def _unigram() -> Any:
    trainer = trainers.UnigramTrainer(vocab_size=70, unk_token="<unk>", show_progress=False)
    learned = sorted(_trained(models.Unigram(), trainer).get_vocab())
    pieces = [(word, -2.0 - i / 10) for i, word in enumerate(learned) if word != "<unk>"]
    rare = [(name, -30.0) for name in _NAMES]
    inner = tokenizers.Tokenizer(models.Unigram([*rare, *pieces], 0, byte_fallback=True))
    inner.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="always")
    return inner


def metaspace_tokenizer(*, unigram: bool = False) -> Tokenizer:
    """The same as a `Tokenizer`."""
    return Tokenizer(metaspace_backend(unigram=unigram))


def bpe_tokenizer() -> Tokenizer:
    """GPT-2's way: bytes written as letters."""
    return Tokenizer(bpe_backend())


def _plain_tokenizer(words: Sequence[str], merges: Sequence[tuple[str, str]] = ()) -> Tokenizer:
    vocab = {word: i for i, word in enumerate(words)}
    inner = tokenizers.Tokenizer(models.BPE(vocab, list(merges)))
    return Tokenizer(tf.PreTrainedTokenizerFast(tokenizer_object=inner))


def letters_tokenizer(vocab_size: int) -> Tokenizer:
    """`LetterTokenizer`'s ids, which can be read as bytes."""
    return _plain_tokenizer([chr(ord("a") + i) for i in range(vocab_size)])


def other_letters_tokenizer(vocab_size: int, *, pairs: bool) -> Tokenizer:
    """The same letters in another order, and the pairs "ab", "cd", ... if wanted."""
    letters = [chr(ord("a") + i) for i in range(vocab_size)]
    merges = list(zip(letters[::2], letters[1::2], strict=False)) if pairs else []
    return _plain_tokenizer([*map("".join, merges), *reversed(letters)], merges)


def foreign_drafter(
    match: Match,
    target: Tokenizer,
    draft: Tokenizer,
    model: Model,
    *,
    num_blocks: int = 200,
    block_size: int = 4,
) -> ForeignDrafter:
    """A drafter with its own pool, KV debug mode on."""
    pool = BlockPool(model.spec.kv, num_blocks=num_blocks, block_size=block_size, debug=True)
    bridge = Bridge.make(target, draft, draft_size=model.spec.vocab_size)
    return ForeignDrafter(model, pool, bridge, match)


def letters_drafter(match: Match, vocab_size: int, **pool: int) -> ForeignDrafter:
    """A GPT-2 that writes pairs of letters, for a target that writes letters."""
    draft = other_letters_tokenizer(vocab_size, pairs=True)
    model = hf_model("gpt2", vocab_size=len(draft), seed=70, calm=True)
    return foreign_drafter(match, letters_tokenizer(vocab_size), draft, model, **pool)


def knowing_model(
    tokenizer: Tokenizer, texts: Sequence[str], *, name: str = "knowing", max_len: int = 4000
) -> ToyModel:
    """A model that goes on with one of `texts` wherever its history is the beginning of one.

    It reads its history back from its KV, so it knows nothing where a slot holds the wrong token.
    """
    speller = Speller(tokenizer)
    size = len(speller.table)
    known = [text.encode() for text in texts]
    ends = sorted(tokenizer.eos_token_ids)

    @lru_cache(maxsize=100_000)
    def law(history: History) -> list[float]:
        read = speller.spell(history)
        if speller.leads:
            read = read.removeprefix(b" ")
        rest = [text[len(read) :] for text in known if text.startswith(read)]
        if not rest:
            return [0.0] * size
        following = speller.encode(rest[0][:40])
        token = following[0] if following else ends[0]
        return [12.0 if i == token else 0.0 for i in range(size)]

    return ToyModel(law, size, name=name, max_model_len=max_len)
