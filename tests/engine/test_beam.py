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
