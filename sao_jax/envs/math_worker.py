"""Symbolic comparison by math-verify, made to be loaded by a helper process of `Sandbox`, which puts limits to it.

The library's own time limits are alarms, which work in a main thread only, and sympy can fill any memory.
"""

import logging

from latex2sympy2_extended import NormalizationConfig
from math_verify import LatexExtractionConfig, parse, verify

logging.disable()  # its warnings that time limits are off
_SPELLING = NormalizationConfig(basic_latex=True, units=False, malformed_operators=True, nits=True, boxed="all")
_CONFIG = [LatexExtractionConfig(boxed_match_priority=0, normalization_config=_SPELLING)]  # units are the caller's


def equal(answer: str, reference: str) -> bool:
    """Whether two pieces of LaTeX mean the same; False if either cannot be read."""
    gold, given = (
        parse(f"\\boxed{{{text}}}", _CONFIG, fallback_mode="no_fallback", parsing_timeout=None)
        for text in (reference, answer)
    )
    return bool(gold and given) and verify(gold, given, timeout_seconds=None)


equal("\\frac{1}{2}x+\\sqrt{3}", "\\sqrt{3}+x/2")  # warms up parser tables, which all children then have
