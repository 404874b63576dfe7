"""toque: an inference engine for large language models.

from toque import LLM, SamplingParams
LLM("smollm2").generate("The capital of France is", SamplingParams(temperature=0, max_tokens=8))
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"
__all__ = ["LLM", "EngineOptions", "Grammar", "SamplingParams", "__version__"]

if TYPE_CHECKING:
    from toque.llm import LLM
    from toque.options import EngineOptions
    from toque.types import Grammar, SamplingParams


def __getattr__(name: str) -> Any:
    """Lazy, so that `toque --help` does not wait for numpy and the tokenizer."""
    if name == "LLM":
        from toque.llm import LLM

        return LLM
    if name == "EngineOptions":
        from toque.options import EngineOptions

        return EngineOptions
    if name == "SamplingParams":
        from toque.types import SamplingParams

        return SamplingParams
    if name == "Grammar":
        from toque.types import Grammar

        return Grammar
    raise AttributeError(f"module 'toque' has no attribute {name!r}")
