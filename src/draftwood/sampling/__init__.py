"""How tokens are chosen. Pure functions of logits, parameters and a seed."""

from draftwood.sampling.params import SamplingParams
from draftwood.sampling.walk import Verdict, choose, walk

__all__ = ["SamplingParams", "Verdict", "choose", "walk"]
