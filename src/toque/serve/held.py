"""What a chat's answer is held to: a format, the calls of its tools, or either of both.

Owns: nothing. Knows: the offer, the format that is asked for, how the model writes calls.
Does not know: fields, tokens, how grammars are compiled.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from msgspec import structs

from toque.errors import RequestError
from toque.serve.call_grammars import (
    call_beginnings,
    calls_instead,
    grammar_of_calls,
    is_constrained,
    without_calls,
)
from toque.serve.formats import Formats
from toque.serve.offer import Offer
from toque.serve.prompts import Prompt
from toque.serve.schema import Sampling
from toque.serve.service import Service
from toque.serve.tools.output import REASONING_PARSERS, Calls
from toque.types import Grammar, GrammarKind

Wanted = tuple[Grammar, str]  # a format, and the field that asks for it
_BREAKS = ("", "\n", "\n\n")  # what may stand between the reasoning and the answer


@dataclass(frozen=True, slots=True)
class Held:
    grammar: Grammar | None
    prompt: Prompt  # after which reasoning is now certain where it may come
    calls: Calls = "anywhere"  # where they are looked for


async def held_to(
    service: Service, body: Sampling, offer: Offer, prompt: Prompt, wanted: Wanted | None
) -> Held:
    """`wanted`: of the answer's text. Where calls must be made there is none, and it only has to
    be one that could be kept to. Raises RequestError: after this the grammar is compiled."""
    hello, tokenizer = service.require_ready()
    formats = service.formats(tokenizer)
    tags = REASONING_PARSERS[formats.reasoning] if formats.reasoning else None
    after = tags[1] if tags and prompt.thinking != "closed" else ""
    if is_constrained(offer) and body.ignore_eos:
        raise RequestError(
            "'ignore_eos' with calls that are enforced is not supported", "ignore_eos"
        )
    calls: Calls = "anywhere"
    if wanted is not None and offer.shown:
        await service.grammars.check(*wanted, hello, tokenizer)
    if wanted is not None and offer.mode == "auto":
        wanted, calls = await _or_calls(service, offer, formats, wanted), "first"
    elif is_constrained(offer):
        markers = await service.grammars.markers(hello, tokenizer)
        wanted = grammar_of_calls(offer, formats, after, markers), "tools"
    elif wanted is not None:
        calls = "never"
    if wanted is None:
        return Held(None, prompt)
    grammar = structs.replace(wanted[0], after=after)
    await service.grammars.check(grammar, wanted[1], hello, tokenizer)
    return Held(grammar, replace(prompt, thinking="open" if after else prompt.thinking), calls)


async def _or_calls(service: Service, offer: Offer, formats: Formats, wanted: Wanted) -> Wanted:
    """The format, or calls instead; which of them an answer is, its beginning tells.

    Raises RequestError for a format in which an answer could begin like a call."""
    known, (grammar, param) = service.require_ready(), wanted
    calls = calls_instead(offer, formats, await service.grammars.markers(*known))
    await service.grammars.check(Grammar(kind=GrammarKind.LARK, text=calls), "tools", *known)
    answer: Grammar | None = grammar
    if await _is_like_a_call(service, offer, formats, wanted):
        answer = without_calls(grammar) if formats.tools == "llama3_json" else None
        if answer is not None:
            await service.grammars.check(answer, param, *known)
            if await _is_like_a_call(service, offer, formats, (answer, param)):
                answer = None
    if answer is None:
        raise RequestError(
            f"'{param}' with tools that may be called is not supported where an answer can begin "
            "as this model's calls do; use it with 'tool_choice': 'none'",
            param,
        )
    return structs.replace(answer, calls=calls), param


async def _is_like_a_call(service: Service, offer: Offer, formats: Formats, wanted: Wanted) -> bool:
    beginnings = call_beginnings(offer, formats)
    if wanted[0].kind is not GrammarKind.JSON_SCHEMA:
        if formats.tools == "llama3_json":
            beginnings = ["{", *" \t\r\n"]  # what is JSON may be spelled in many ways
        if wanted[0].kind is GrammarKind.LARK:
            # Of two rules' pieces llguidance follows the longer one, once that has begun.
            beginnings = [text[0] for text in beginnings]
        beginnings = [blank + text for blank in _BREAKS for text in beginnings]
    return await service.grammars.may_begin(wanted[0], beginnings, *service.require_ready())
