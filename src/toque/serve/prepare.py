"""From a checked body to the engine's Requests: tokens, sampling, one Request per choice.

Owns: nothing. Knows: the model's context and vocabulary (Hello), limits.
Does not know: HTTP, the shapes of answers. Every 400 of a generation route has happened by here.
"""

from __future__ import annotations

import re
import time
import uuid
from dataclasses import dataclass, replace
from typing import Literal

from msgspec import structs

from toque.errors import RequestError
from toque.serve.constraints import constraint
from toque.serve.conversation import chat_conversation
from toque.serve.failures import short
from toque.serve.formats import Formats
from toque.serve.held import held_to
from toque.serve.offer import NO_OFFER, Offer
from toque.serve.params import bad_words, check_choice_left, sampling_params
from toque.serve.prompts import Prompt, chat_prompt, completion_prompts
from toque.serve.schema import ChatBody, CompletionBody, EmbeddingBody, Sampling, StreamOptions
from toque.serve.service import Service
from toque.serve.thinking import thinking_budget
from toque.serve.tools.output import PLAIN, Calls, Format
from toque.types import Grammar, Request, SamplingParams, Slo, ThinkingBudget

COMPLETION_TOKENS = 16  # OpenAI's default for /v1/completions
MAX_CALL_GRAMMAR_CHARS = 1 << 24  # of a grammar x sequences of one request
Kind = Literal["cmpl", "chatcmpl", "resp"]
_SPELLED: dict[Kind, str] = {"cmpl": "cmpl-", "chatcmpl": "chatcmpl-", "resp": "resp_"}
_CLIENT_ID = re.compile(r"[A-Za-z0-9._:-]{1,128}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Show:
    """What of an answer is shown, and how."""

    skip_special_tokens: bool
    return_token_ids: bool
    include_stop: bool  # the stop string stays at the end of the text
    tokens_as_ids: bool  # logprobs spell a token as "token_id:7"
    echo_logprobs: int | None = None  # alternatives per echoed token; None = no logprobs of them
    prompt_logprobs: int | None = None  # the same in vLLM's form
    reasoning: bool = True


@dataclass(frozen=True, slots=True)
class Arrival:
    """When a call came, and the class of service that it has."""

    at_s: float
    slo: Slo | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """One HTTP call, ready for the engine. `requests[p * n + c]` is choice c of prompt p."""

    id: str
    kind: Kind
    model: str
    created_unix_s: int
    requests: tuple[Request, ...]
    prompts: tuple[Prompt, ...]
    n: int
    end_ids: frozenset[int]  # of the model and of the request: they end it and are not shown
    stream: bool
    options: StreamOptions
    show: Show
    client_id: str | None  # the client's own name of the call, unique among open ones
    cut_to_tokens: int | None  # what is left of max_tokens, where the context cuts it
    offer: Offer = NO_OFFER
    form: Format = PLAIN  # how its answers are written; form_of says it of one prompt
    marker_ids: frozenset[int] = frozenset()  # tokens that the form is made of

    @property
    def sampling(self) -> SamplingParams:
        return self.requests[0].sampling

    def form_of(self, prompt: Prompt) -> Format:
        thinks = self.form.reasoning if prompt.thinking != "closed" else None
        return replace(self.form, reasoning=thinks, in_reasoning=prompt.thinking == "open")


@dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    """What the routes say of a job each in their own words."""

    kind: Kind
    prompts: list[Prompt]
    max_tokens: int | None
    logprobs: int | None
    show: Show
    offer: Offer = NO_OFFER
    grammar: Grammar | None = None
    calls: Calls = "anywhere"
    thinking: ThinkingBudget | None = None


async def completion_job(
    service: Service, body: CompletionBody, arrived_s: float, slo: Slo | None = None
) -> Job:
    """Raises RequestError, FailedCall: each names the parameter at fault."""
    hello, tokenizer = service.require_ready()
    most = COMPLETION_TOKENS if body.max_tokens is None else body.max_tokens
    if most == 0 and not body.echo and body.prompt_logprobs is None:
        raise RequestError(
            "'max_tokens' is 0, which needs 'echo' or 'prompt_logprobs'", "max_tokens"
        )
    service.model_name(hello, body.model)
    grammar = await _grammar(service, body)
    prompts = await completion_prompts(service, hello, tokenizer, body)
    show = replace(_show(body), echo_logprobs=body.logprobs if body.echo else None)
    asked = Asked(
        kind="cmpl",
        prompts=prompts,
        max_tokens=most,
        logprobs=body.logprobs,
        show=show,
        grammar=grammar,
    )
    return make_job(service, body, asked, Arrival(arrived_s, slo))


async def chat_job(
    service: Service, body: ChatBody, arrived_s: float, slo: Slo | None = None
) -> Job:
    """Raises RequestError, FailedCall: each names the parameter at fault."""
    hello, tokenizer = service.require_ready()
    service.model_name(hello, body.model)
    conversation = chat_conversation(body, service.options.allow_unknown_fields)
    prompt = await chat_prompt(service, hello, tokenizer, body, conversation)
    held = await held_to(service, body, conversation.offer, prompt, constraint(body))
    asked = Asked(
        kind="chatcmpl",
        prompts=[held.prompt],
        max_tokens=_chat_limit(body),
        logprobs=_chat_logprobs(body),
        show=replace(_show(body), reasoning=body.include_reasoning is not False),
        offer=conversation.offer,
        grammar=held.grammar,
        calls=held.calls,
        thinking=await thinking_budget(service, body.thinking_token_budget, held.prompt),
    )
    return make_job(service, body, asked, Arrival(arrived_s, slo))


async def _grammar(service: Service, body: Sampling) -> Grammar | None:
    """What the output must look like, checked. Raises RequestError."""
    found = constraint(body)
    if found is None:
        return None
    grammar, param = found
    await service.grammars.check(grammar, param, *service.require_ready())
    return grammar


# ------------------------------------------------------------------------------------ sampling


def _chat_limit(body: ChatBody) -> int | None:
    old, new = body.max_tokens, body.max_completion_tokens
    if old is not None and new is not None and old != new:
        raise RequestError(
            "'max_tokens' and 'max_completion_tokens' differ; give one of them", "max_tokens"
        )
    return old if new is None else new


def _chat_logprobs(body: ChatBody) -> int | None:
    if body.logprobs:
        return body.top_logprobs or 0
    if body.top_logprobs:
        raise RequestError("'top_logprobs' needs 'logprobs' to be true", "top_logprobs")
    return None


def _show(body: Sampling) -> Show:
    if body.stream and body.prompt_logprobs is not None:
        raise RequestError("'prompt_logprobs' with 'stream' is not supported", "prompt_logprobs")
    return Show(
        skip_special_tokens=body.skip_special_tokens is not False,
        return_token_ids=bool(body.return_token_ids),
        include_stop=bool(body.include_stop_str_in_output),
        tokens_as_ids=bool(body.return_tokens_as_token_ids),
        prompt_logprobs=body.prompt_logprobs,
    )


def check_names(service: Service, body: Sampling | EmbeddingBody) -> None:
    """The fields that name the call and its place in the queue. Raises RequestError."""
    if body.request_id is not None and not _CLIENT_ID.fullmatch(body.request_id):
        raise RequestError(
            f"'request_id' must be 1 to 128 letters, digits or any of ._:- and is "
            f"'{short(body.request_id, 24)}'",
            "request_id",
        )
    hello, _ = service.require_ready()
    if body.priority and hello.scheduling_policy != "priority":
        raise RequestError(
            "'priority' is not supported by this server's order of service; start it with "
            "--scheduling-policy priority",
            "priority",
        )


def make_job(service: Service, body: Sampling, asked: Asked, arrival: Arrival) -> Job:
    """Raises RequestError."""
    if body.stream_options is not None and not body.stream:
        raise RequestError("'stream_options' needs 'stream' to be true", "stream_options")
    check_names(service, body)
    hello, tokenizer = service.require_ready()
    show, max_tokens, prompts = asked.show, asked.max_tokens, asked.prompts
    seed = service.seed(body.seed)
    shared = sampling_params(body, hello, service.options, max_tokens, asked.logprobs, seed)
    scored = [k for k in (show.echo_logprobs, show.prompt_logprobs) if k is not None]
    shared = structs.replace(
        shared,
        prompt_logprobs=max(scored, default=None),
        bad_words=bad_words(body.bad_words or [], tokenizer),
    )
    ends = () if shared.ignore_eos else hello.end_token_ids
    check_choice_left(shared, ends)
    _check_grammar_size(asked.grammar, len(prompts) * (body.n or 1))
    requests = _requests(body, asked, shared, hello.max_model_len, arrival)
    least = min(r.sampling.max_tokens or 0 for r in requests)
    form = _form(service.formats(tokenizer), asked)
    return Job(
        id=_SPELLED[asked.kind] + (body.request_id or uuid.uuid4().hex),
        kind=asked.kind,
        model=service.model_name(hello, body.model),
        created_unix_s=int(time.time()),
        requests=requests,
        prompts=tuple(prompts),
        n=body.n or 1,
        end_ids=frozenset((*ends, *shared.stop_token_ids)),
        stream=bool(body.stream),
        options=body.stream_options or StreamOptions(),
        show=show,
        client_id=body.request_id,
        cut_to_tokens=least if max_tokens is not None and least < max_tokens else None,
        offer=asked.offer,
        form=form,
        marker_ids=frozenset(
            i for i in (tokenizer.token_id(mark) for mark in form.markers) if i is not None
        ),
    )


def _form(formats: Formats, asked: Asked) -> Format:
    """How the answers are read: /v1/completions is text and nothing else."""
    if asked.kind == "cmpl":
        return PLAIN
    offered = asked.offer
    return Format(
        tools=formats.tools if offered.tools and asked.calls != "never" else None,
        calls=asked.calls,
        schemas=offered.schemas,
        may_call=offered.mode != "none",
        parallel=offered.parallel and offered.mode != "named",
        reasoning=formats.reasoning,
    )


def _check_grammar_size(grammar: Grammar | None, sequences: int) -> None:
    """Every sequence carries its grammar to the engine."""
    if grammar is not None and grammar.num_chars * sequences > MAX_CALL_GRAMMAR_CHARS:
        raise RequestError(
            f"a grammar of {grammar.num_chars} characters for {sequences} sequences is too much "
            f"for one request; at most {MAX_CALL_GRAMMAR_CHARS} characters altogether",
            "n",
        )


def _requests(
    body: Sampling,
    asked: Asked,
    shared: SamplingParams,
    context: int,
    arrival: Arrival,
) -> tuple[Request, ...]:
    """One per choice of each prompt, its output cut to what the context leaves."""
    requests: list[Request] = []
    name = uuid.uuid4().hex  # never the client's: an id is unique over the server's life
    for prompt in asked.prompts:
        room = context - len(prompt.tokens)
        most = room if shared.max_tokens is None else min(room, shared.max_tokens)
        sampling = structs.replace(shared, max_tokens=most, min_tokens=min(most, shared.min_tokens))
        unscored = structs.replace(sampling, prompt_logprobs=None)
        for choice in range(body.n or 1):
            requests.append(
                Request(
                    id=f"{name}-{len(requests)}",
                    prompt=prompt.tokens,
                    sampling=unscored if choice else sampling,  # its prompt is scored once
                    arrived_s=arrival.at_s,
                    slo=arrival.slo,
                    choice=choice,
                    cache_salt=body.cache_salt or "",
                    priority=body.priority or 0,
                    grammar=asked.grammar,
                    thinking=asked.thinking,
                )
            )
    return tuple(requests)
