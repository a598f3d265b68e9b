"""Beam search over the token tree: the texts and scores of `transformers.generate(num_beams=k)`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
import transformers as tf

from draftwood.sampling import SamplingParams
from tests import tiny

PROMPT = [3, 9, 4, 17, 5, 9, 4]


def theirs(
    module: Any, prompt: Sequence[int], eos: Sequence[int] = (), **values: Any
) -> list[tuple[list[int], float]]:
    """transformers' texts, end token included, with their scores."""
    ids = torch.tensor([list(prompt)])
    pad = 0 if 0 not in eos else 1
    config = tf.GenerationConfig(
        do_sample=False,
        pad_token_id=pad,
        eos_token_id=list(eos) or None,
        output_scores=True,
        return_dict_in_generate=True,
        **values,
    )
    found = module.generate(ids, attention_mask=torch.ones_like(ids), generation_config=config)
    texts = []
    for row, score in zip(found.sequences, found.sequences_scores, strict=True):
        tokens = row[len(prompt) :].tolist()
        end = next((i + 1 for i, token in enumerate(tokens) if token in eos), len(tokens))
        texts.append((tokens[:end], float(score)))
    return texts


def ours(llm: tiny.TinyLLM, prompt: Sequence[int], params: SamplingParams) -> list[Any]:
    [output] = llm.outputs([prompt], params)
    return [output, *output.alternatives]


def assert_same(found: Sequence[Any], expected: Sequence[tuple[list[int], float]]) -> None:
    assert [list(output.token_ids) for output in found] == [tokens for tokens, _ in expected]
    for output, (_, score) in zip(found, expected, strict=True):
        assert output.score == pytest.approx(score, abs=1e-4)


@pytest.mark.parametrize("arch", sorted(tiny.ARCHITECTURES))
@pytest.mark.parametrize("num_beams", [2, 4])
def test_texts_are_those_of_transformers(arch: str, num_beams: int) -> None:
    module, llm = tiny.reference(arch), tiny.tiny_llm(arch, block_size=3)
    expected = theirs(
        module, PROMPT, num_beams=num_beams, max_new_tokens=14, num_return_sequences=num_beams
    )
    params = SamplingParams(
        max_tokens=14, num_beams=num_beams, num_return_sequences=num_beams, ignore_eos=True
    )
    assert_same(ours(llm, PROMPT, params), expected)


@pytest.mark.parametrize("early_stopping", [False, True, "never"])
@pytest.mark.parametrize("length_penalty", [-1.0, 0.0, 1.0, 2.5])
@pytest.mark.parametrize("eos", [(5,), (5, 11, 20)])
def test_ends_and_penalties_are_those_of_transformers(
    early_stopping: bool | str, length_penalty: float, eos: tuple[int, ...]
) -> None:
    module = tiny.reference("llama", calm=True)
    model = tiny.hf_model("llama", calm=True)
    llm = tiny.tiny_llm(model, tokenizer=tiny.LetterTokenizer(eos=eos))
    lengths = set()
    for num_beams, length in ((2, 12), (3, 25), (5, 18)):
        expected = theirs(
            module,
            PROMPT,
            eos,
            num_beams=num_beams,
            max_new_tokens=length,
            num_return_sequences=num_beams,
            length_penalty=length_penalty,
            early_stopping=early_stopping,
        )
        params = SamplingParams(
            max_tokens=length,
            num_beams=num_beams,
            num_return_sequences=num_beams,
            length_penalty=length_penalty,
            early_stopping=early_stopping,
        )
        found = ours(llm, PROMPT, params)
        assert_same(found, expected)
        for output in found:
            ended = output.token_ids[-1] in eos
            assert output.finish_reason == ("stop" if ended else "length")
        lengths |= {len(tokens) for tokens, _ in expected}
    assert len(lengths) > 1, "every text has the same length: nothing ended early"


RULES: list[tuple[dict[str, Any], dict[str, Any]]] = [
    ({"repetition_penalty": 1.5}, {"repetition_penalty": 1.5}),
    ({"min_tokens": 9}, {"min_new_tokens": 9}),
    ({"logit_bias": {3: -2.0, 8: 1.5}}, {"sequence_bias": {(3,): -2.0, (8,): 1.5}}),
    ({"bad_words": ("f", "ej")}, {"bad_words_ids": [[5], [4, 9]]}),
    (
        {"repetition_penalty": 1.3, "logit_bias": {8: 1.0}, "min_tokens": 4},
        {"repetition_penalty": 1.3, "sequence_bias": {(8,): 1.0}, "min_new_tokens": 4},
    ),
]


@pytest.mark.parametrize(("mine", "other"), RULES)
def test_rules_act_on_each_beam_as_in_transformers(
    mine: dict[str, Any], other: dict[str, Any]
) -> None:
    """On log-probabilities, for the beam's own text: a penalty on logits gives other texts."""
    eos = (11, 20)
    model = tiny.hf_model("qwen3", calm=True)
    llm = tiny.tiny_llm(model, tokenizer=BareLetters(eos=eos))
    values: dict[str, Any] = {"num_beams": 4, "num_return_sequences": 4, "length_penalty": -1.0}
    params = SamplingParams(max_tokens=16, **values)
    expected = theirs(
        tiny.reference("qwen3", calm=True), PROMPT, eos, max_new_tokens=16, **values, **other
    )
    found = ours(llm, PROMPT, params.but(**mine))
    assert_same(found, expected)
    free = ours(llm, PROMPT, params)
    assert [o.token_ids for o in free] != [o.token_ids for o in found], "the rule did nothing"


class BareLetters(tiny.LetterTokenizer):
    """Letters; a bad word is spelled one way, as transformers is told."""

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """The ids of the characters but for spaces."""
        return super().encode(text.replace(" ", ""), add_special_tokens=add_special_tokens)


def test_one_beam_is_plain_decoding() -> None:
    llm = tiny.tiny_llm("llama")
    [output] = llm.outputs([PROMPT], SamplingParams(max_tokens=20, num_beams=1, ignore_eos=True))
    assert list(output.token_ids) == tiny.greedy_reference("llama", PROMPT, 20)
    assert output.score is None
