"""How the served model writes calls and reasoning: told by the operator, or read off its template.

Owns: nothing. Knows: the marks that templates carry. Does not know: parsers, requests.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from typing import Protocol

# What a template must hold to be taken for a format, the more special before the more general.
_TOOL_MARKS = (
    ("qwen3_coder", "<function="),
    ("hermes", "<tool_call>"),
    ("mistral", "[TOOL_CALLS]"),
    ("llama3_json", '"parameters":'),
)
_REASONING_MARKS = (("qwen3", "</think>"), ("mistral", "[THINK]"))
AUTO, NONE = "auto", "none"


class TemplateText(Protocol):
    """What is asked of a tokenizer about its chat template."""

    @property
    def template_text(self) -> str: ...

    @property
    def template_variables(self) -> Collection[str]: ...


@dataclass(frozen=True, slots=True)
class Formats:
    """Of the served model. `tools`, `reasoning`: parsers by name, None = no such parts."""

    tools: str | None = None
    reasoning: str | None = None
    shows_tools: bool = False  # the template tells the model of tools
    named_arguments: bool = False  # Mistral's newer form: a name, then [ARGS]
    variables: frozenset[str] = frozenset()  # that the template asks for


def formats_of(tool_parser: str, reasoning_parser: str, template: TemplateText) -> Formats:
    """`tool_parser`, `reasoning_parser`: the flags, of known names, auto or none."""
    text, variables = template.template_text, frozenset(template.template_variables)
    shows = "tools" in variables
    return Formats(
        tools=_found(tool_parser, _TOOL_MARKS, text if shows else ""),
        reasoning=_found(reasoning_parser, _REASONING_MARKS, text),
        shows_tools=shows,
        named_arguments="[ARGS]" in text,
        variables=variables,
    )


def _found(flag: str, marks: tuple[tuple[str, str], ...], text: str) -> str | None:
    if flag != AUTO:
        return None if flag == NONE else flag
    plain = text.replace('\\"', '"')
    return next((name for name, mark in marks if mark in plain), None)
