"""From a checked body to the engine's Requests: tokens, sampling, one Request per choice.

Owns: nothing. Knows: the model's context and vocabulary (Hello), the tokenizer, limits.
Does not know: HTTP, the shapes of answers. Every 400 of a generation route has happened by here.
"""

from __future__ import annotations

import time
import uuid
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from msgspec import structs

from toque.errors import RequestError
from toque.serve import fields
from toque.serve.failures import FailedCall, Failure, short
from toque.serve.params import sampling_params
from toque.serve.schema import (
    MAX_PROMPTS,
    MAX_SEQUENCES,
    ChatBody,
    CompletionBody,
    StreamOptions,
)
from toque.serve.service import Service, TextTokenizer, check_ids
from toque.types import Hello, Request, SamplingParams

COMPLETION_TOKENS = 16  # OpenAI's default for /v1/completions
_ROLES = ("system", "developer", "user", "assistant")


@dataclass(frozen=True, slots=True)
class Prompt:
    tokens: tuple[int, ...]
    echo: str = ""  # what comes before the output, where the client asked for it


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """One HTTP call, ready for the engine. `requests[p * n + c]` is choice c of prompt p."""

    id: str
    chat: bool
    model: str
    created_unix_s: int
    requests: tuple[Request, ...]
    prompts: tuple[Prompt, ...]
    n: int
    end_ids: frozenset[int]  # of the model and of the request: they end it and are not shown
    stream: bool
    options: StreamOptions
    skip_special_tokens: bool
    return_token_ids: bool

    @property
    def sampling(self) -> SamplingParams:
        return self.requests[0].sampling


async def completion_job(service: Service, body: CompletionBody, arrived_s: float) -> Job:
    """Raises RequestError, FailedCall: each names the parameter at fault."""
    hello, tokenizer = service.require_ready()
    model = service.model_name(hello, body.model)
    if body.echo and body.logprobs is not None:
        raise RequestError("'echo' together with 'logprobs' is not supported", "echo")
    texts = _prompt_list(body.prompt)
    _check_sequences(len(texts), body.n or 1)
    size_chars = sum(len(text) for text in texts if isinstance(text, str))
    prompts = await service.text_work(
        size_chars, lambda: [_tokenize(tokenizer, hello, text, bool(body.echo)) for text in texts]
    )
    for prompt in prompts:
        _check_prompt(prompt.tokens, hello, "prompt")
    asked = body.max_tokens or COMPLETION_TOKENS
    return _job(service, hello, model, body, prompts, asked, body.logprobs, arrived_s)


async def chat_job(service: Service, body: ChatBody, arrived_s: float) -> Job:
    """Raises RequestError, FailedCall: each names the parameter at fault."""
    hello, tokenizer = service.require_ready()
    model = service.model_name(hello, body.model)
    _check_sequences(1, body.n or 1)
    tokens = await chat_tokens(
        service, tokenizer, body.messages, body.add_generation_prompt, body.chat_template_kwargs
    )
    _check_prompt(tokens, hello, "messages")
    prompts = [Prompt(tuple(tokens))]
    return _job(
        service, hello, model, body, prompts, _chat_limit(body), _chat_logprobs(body), arrived_s
    )


async def chat_tokens(
    service: Service,
    tokenizer: TextTokenizer,
    messages: list[dict[str, Any]],
    add_generation_prompt: bool | None,
    template_kwargs: Mapping[str, Any] | None,
) -> list[int]:
    """The prompt of a conversation. Raises RequestError."""
    plain = [_message(message, f"messages[{i}].") for i, message in enumerate(messages)]
    kwargs = dict(template_kwargs or {})
    if "add_generation_prompt" in kwargs:
        path = "chat_template_kwargs.add_generation_prompt"
        raise RequestError(f"'{path}' is a field of its own; use that", path)
    generation = add_generation_prompt is not False
    size_chars = sum(len(message["content"]) for message in plain)
    return await service.text_work(
        size_chars,
        lambda: tokenizer.encode_chat(plain, add_generation_prompt=generation, **kwargs),
    )


# ------------------------------------------------------------------------------------- prompts


def _prompt_list(prompt: Any) -> list[str | list[int]]:
    prompts: list[str | list[int]]
    if isinstance(prompt, str) or (prompt and isinstance(prompt[0], int)):
        prompts = [prompt]
    else:
        prompts = prompt
    if not prompts or any(not p for p in prompts):
        raise RequestError("'prompt' must not be empty", "prompt")
    if len(prompts) > MAX_PROMPTS:
        raise RequestError(
            f"'prompt' holds {len(prompts)} prompts; at most {MAX_PROMPTS}", "prompt"
        )
    return prompts


def _check_sequences(prompts: int, n: int) -> None:
    if prompts * n > MAX_SEQUENCES:
        raise RequestError(
            f"{prompts} prompts x 'n' {n} are too many; at most {MAX_SEQUENCES} sequences", "n"
        )


def _tokenize(
    tokenizer: TextTokenizer, hello: Hello, prompt: str | list[int], echo: bool
) -> Prompt:
    if isinstance(prompt, str):
        return Prompt(tuple(tokenizer.encode(prompt)), prompt if echo else "")
    check_ids(prompt, hello.vocab_size, "prompt")
    return Prompt(tuple(prompt), tokenizer.decode(prompt) if echo else "")


def _check_prompt(tokens: tuple[int, ...] | list[int], hello: Hello, param: str) -> None:
    if not tokens:
        raise RequestError(f"'{param}' has no tokens", param)
    if len(tokens) >= hello.max_model_len:
        message = (
            f"the prompt has {len(tokens)} tokens; the context of {hello.max_model_len} tokens "
            f"holds at most {hello.max_model_len - 1} and one to generate"
        )
        raise FailedCall(Failure(400, message, param, "context_length_exceeded"))


def _message(message: dict[str, Any], where: str) -> dict[str, Any]:
    """A message as templates expect it: role, content as one text, and a name where given."""
    kept = fields.screen(message, ("role", "content", "name"), fields.MESSAGE_RULES, where)
    role, name = kept.get("role"), kept.get("name")
    if role not in _ROLES:
        shown = short(str(role), 24)
        raise RequestError(
            f"'{where}role' must be one of {', '.join(_ROLES)}; it is {shown}", where + "role"
        )
    if name is not None and not isinstance(name, str):
        raise RequestError(f"'{where}name' must be a string", where + "name")
    plain = {
        "role": "system" if role == "developer" else role,  # the newer name of the same role
        "content": _content(kept.get("content"), where + "content"),
    }
    return plain if name is None else {**plain, "name": name}


def _content(content: Any, path: str) -> str:
    if isinstance(content, str):
        return content
    if not isinstance(content, list) or not content:
        raise RequestError(f"'{path}' must be a string or a list of text parts", path)
    return "\n".join(_part(part, f"{path}[{i}]") for i, part in enumerate(content))


def _part(part: Any, path: str) -> str:
    if not isinstance(part, dict):
        raise RequestError(f"'{path}' must be an object with type 'text'", path)
    if part.get("type") != "text":
        kind = short(str(part.get("type")), 24)
        raise RequestError(f"'{path}': parts of type '{kind}' are not supported", path)
    kept = fields.screen(part, ("type", "text"), {}, path + ".")
    if not isinstance(kept.get("text"), str):
        raise RequestError(f"'{path}.text' must be a string", path + ".text")
    return str(kept["text"])


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


def _job(
    service: Service,
    hello: Hello,
    model: str,
    body: CompletionBody | ChatBody,
    prompts: list[Prompt],
    max_tokens: int | None,
    logprobs: int | None,
    arrived_s: float,
) -> Job:
    if body.stream_options is not None and not body.stream:
        raise RequestError("'stream_options' needs 'stream' to be true", "stream_options")
    chat = isinstance(body, ChatBody)
    job_id = f"{'chatcmpl' if chat else 'cmpl'}-{uuid.uuid4().hex}"
    shared = sampling_params(body, hello, max_tokens, logprobs, service.seed(body.seed))
    ends = () if shared.ignore_eos else hello.end_token_ids
    n = body.n or 1
    return Job(
        id=job_id,
        chat=chat,
        model=model,
        created_unix_s=int(time.time()),
        requests=_requests(job_id, prompts, n, shared, hello.max_model_len, arrived_s),
        prompts=tuple(prompts),
        n=n,
        end_ids=frozenset((*ends, *shared.stop_token_ids)),
        stream=bool(body.stream),
        options=body.stream_options or StreamOptions(),
        skip_special_tokens=body.skip_special_tokens is not False,
        return_token_ids=bool(body.return_token_ids),
    )


def _requests(
    job_id: str,
    prompts: list[Prompt],
    n: int,
    shared: SamplingParams,
    context: int,
    arrived_s: float,
) -> tuple[Request, ...]:
    """One per choice of each prompt, its output cut to what the context leaves."""
    requests: list[Request] = []
    for prompt in prompts:
        room = context - len(prompt.tokens)
        most = room if shared.max_tokens is None else min(room, shared.max_tokens)
        sampling = structs.replace(shared, max_tokens=most, min_tokens=min(most, shared.min_tokens))
        for choice in range(n):
            request_id = f"{job_id}-{len(requests)}"
            requests.append(
                Request(
                    id=request_id,
                    prompt=prompt.tokens,
                    sampling=sampling,
                    arrived_s=arrived_s,
                    choice=choice,
                )
            )
    return tuple(requests)
