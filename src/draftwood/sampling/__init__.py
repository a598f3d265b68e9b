"""How tokens are chosen. Pure functions of logits, parameters and a seed."""

from draftwood.sampling.params import SamplingParams
from draftwood.sampling.rules import Rules, make_rules
from draftwood.sampling.structured import StructuredOutputsParams
from draftwood.sampling.walk import TokenLogprobs, Verdict, choose, token_logprobs, walk

__all__ = [
    "Rules",
    "SamplingParams",
    "StructuredOutputsParams",
    "TokenLogprobs",
    "Verdict",
    "choose",
    "make_rules",
    "token_logprobs",
    "walk",
]
