"""The one form of what a model is asked to go on with, whatever route it came by.

Owns: nothing. Knows: the chat fields of a body. Does not know: templates, tokens, answers.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from toque.errors import RequestError
from toque.serve.chat_template import RESERVED_VARIABLES
from toque.serve.formats import Formats
from toque.serve.messages import plain_messages
from toque.serve.offer import NO_OFFER, Offer, offer
from toque.serve.schema import ChatBody, TokenizeBody

_TEMPLATE_S_OWN = frozenset({*RESERVED_VARIABLES, "continue_final_message"})


@dataclass(frozen=True, slots=True, kw_only=True)
class Conversation:
    """Messages as templates expect them (messages.py), the tools, and how the next turn begins."""

    messages: list[dict[str, Any]]
    offer: Offer = NO_OFFER
    variables: Mapping[str, Any] = field(default_factory=dict)  # of the template
    add_generation_prompt: bool = True
    carry_on: bool = False  # the last message is not over
    effort: str | None = None
    effort_param: str = "reasoning_effort"  # the field that holds it
    param: str = "messages"  # the field that holds them, for what is said about them


def chat_conversation(body: ChatBody | TokenizeBody, lenient: bool) -> Conversation:
    """Raises RequestError."""
    carry_on = bool(body.continue_final_message)
    if carry_on and body.add_generation_prompt:
        raise RequestError(
            "'continue_final_message' and 'add_generation_prompt' exclude each other",
            "continue_final_message",
        )
    chat = body if isinstance(body, ChatBody) else None
    choice = (chat.tool_choice, chat.parallel_tool_calls) if chat else (None, None)
    return Conversation(
        messages=plain_messages(body.messages or [], lenient),
        offer=offer(body.tools, *choice, lenient),
        variables=template_variables(body.chat_template_kwargs),
        add_generation_prompt=body.add_generation_prompt is not False and not carry_on,
        carry_on=carry_on,
        effort=chat.reasoning_effort if chat else None,
    )


def template_variables(given: Mapping[str, Any] | None) -> dict[str, Any]:
    """Raises RequestError for those that a client may not set."""
    for name in sorted(_TEMPLATE_S_OWN & (given or {}).keys()):
        path = f"chat_template_kwargs.{name}"
        raise RequestError(f"'{path}' is not the template's own to set", path)
    return dict(given or {})


def with_effort(asked: Conversation, formats: Formats) -> dict[str, Any]:
    """The template's variables, the reasoning effort among them. Raises RequestError.

    A template that knows `reasoning_effort` gets it; one that knows `enable_thinking` has it off
    for "none" and on for anything else. A model without either reasons as it does: "none" is then
    all that can be said of one that never reasons.
    """
    variables, effort, path = dict(asked.variables), asked.effort, asked.effort_param
    if effort is None:
        return variables
    if "reasoning_effort" in formats.variables:
        return {"reasoning_effort": effort, **variables}
    if "enable_thinking" in formats.variables:
        return {"enable_thinking": effort != "none", **variables}
    if effort == "none" and formats.reasoning is None:
        return variables
    raise RequestError(f"'{path}' '{effort}' is not supported by this model's chat template", path)
