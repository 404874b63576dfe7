"""Prompts of both routes: from texts, ids or messages to tokens that fit the context.

Owns: nothing. Knows: the tokenizer, the context. Does not know: sampling, requests, answers.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

from toque.errors import RequestError
from toque.serve.conversation import Conversation, with_effort
from toque.serve.failures import FailedCall, Failure
from toque.serve.schema import MAX_PROMPTS, CompletionBody, EmbeddingBody, Sampling
from toque.serve.service import Service, TextTokenizer, check_ids
from toque.serve.tools.fallback import as_text
from toque.serve.tools.output import REASONING_PARSERS
from toque.serve.typed import strings_in
from toque.types import Hello

# Fill in the middle, prefix first: arXiv:2207.14255, section 3. Qwen2.5-Coder's spelling
# (arXiv:2409.12186, section 3.2) and StarCoder's (arXiv:2305.06161, section 3.3).
_MIDDLE_TOKENS = (
    ("<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>"),
    ("<fim_prefix>", "<fim_suffix>", "<fim_middle>"),
)


MAX_CALL_TOKENS = 4_000_000  # prompt tokens x n of one request
PROMPT_COST_CHARS = 64  # what a message or prompt costs beside its text, in characters


_TAIL_TOKENS = 32
# What of the reasoning is left to the output: to go on with it, none, or all of it if there is any.
Thinking = Literal["open", "closed", "ahead"]


@dataclass(frozen=True, slots=True)
class Prompt:
    tokens: tuple[int, ...]
    echo: str = ""  # what comes before the output, where the client asked for it
    thinking: Thinking = "closed"


async def completion_prompts(
    service: Service, hello: Hello, tokenizer: TextTokenizer, body: CompletionBody
) -> list[Prompt]:
    """Raises RequestError, FailedCall: each names the parameter at fault."""
    texts = prompt_list(body.prompt, "prompt")
    check_sequences(service, len(texts), body.n or 1)
    for text in texts:  # before an echo decodes them
        if not isinstance(text, str) and body.truncate_prompt_tokens is None:
            check_fits(text, hello, "prompt")
    # Ids count as well (an echo decodes them), and each prompt has a cost of its own.
    size = sum(len(text) + PROMPT_COST_CHARS for text in texts) + len(body.suffix or "")
    prompts = await service.text_work(size, lambda: _encode_all(tokenizer, hello, body, texts))
    fitting = [_truncated(prompt, tokenizer, hello, body) for prompt in prompts]
    for prompt in fitting:
        check_fits(prompt.tokens, hello, "prompt")
    check_total([len(prompt.tokens) for prompt in fitting], body.n or 1)
    return fitting


def _encode_all(
    tokenizer: TextTokenizer, hello: Hello, body: CompletionBody, texts: list[str | list[int]]
) -> list[Prompt]:
    """Runs in a thread where it is long. Raises RequestError."""
    encode = _middle_encoder(tokenizer, body) if body.suffix else _encoder(tokenizer, hello, body)
    return [encode(text) for text in texts]


async def chat_prompt(
    service: Service, hello: Hello, tokenizer: TextTokenizer, body: Sampling, asked: Conversation
) -> Prompt:
    """Raises RequestError, FailedCall: each names the parameter at fault."""
    check_sequences(service, 1, body.n or 1)
    tokens = await chat_tokens(service, tokenizer, asked)
    whole = Prompt(tuple(tokens), thinking=_thinking(service, tokenizer, tokens, asked))
    prompt = _truncated(whole, tokenizer, hello, body)
    check_fits(prompt.tokens, hello, asked.param)
    check_total([len(prompt.tokens)], body.n or 1)
    return prompt


async def chat_tokens(service: Service, tokenizer: TextTokenizer, asked: Conversation) -> list[int]:
    """The tokens of a conversation. Raises RequestError."""
    formats = service.formats(tokenizer)
    messages, tools = asked.messages, [tool.shown() for tool in asked.offer.shown]
    if tools and formats.tools is None:
        raise RequestError(
            "'tools' is not supported by this model: its chat template knows none "
            "(--tool-call-parser hermes describes them to it in the system message)",
            "tools",
        )
    if not formats.shows_tools:
        messages, tools = as_text(messages, tools), []
    variables = with_effort(asked, formats)
    size_chars = sum(len(text) for text in strings_in([messages, tools, variables]))
    return await service.text_work(
        size_chars + PROMPT_COST_CHARS * len(messages),
        lambda: tokenizer.encode_chat(
            messages,
            add_generation_prompt=asked.add_generation_prompt,
            continue_final_message=asked.carry_on,
            **({"tools": tools} if tools else {}),
            **variables,
        ),
    )


def _thinking(
    service: Service, tokenizer: TextTokenizer, tokens: Sequence[int], asked: Conversation
) -> Thinking:
    """Where the prompt leaves the reasoning: told by its end, not by the model's name."""
    name = service.formats(tokenizer).reasoning
    if name is None:
        return "closed"
    opening, closing = REASONING_PARSERS[name]
    if asked.carry_on:
        text = asked.messages[-1].get("content", "")
        return "open" if text.rfind(opening) > text.rfind(closing) else "closed"
    tail = tokenizer.decode(tokens[-_TAIL_TOKENS:], skip_special_tokens=False).rstrip()
    if tail.endswith(opening):
        return "open"
    return "closed" if tail.endswith(closing) else "ahead"


def check_fits(tokens: Sequence[int], hello: Hello, param: str) -> None:
    if not tokens:
        raise RequestError(f"'{param}' has no tokens", param)
    if len(tokens) >= hello.max_model_len:
        message = (
            f"the prompt has {len(tokens)} tokens; the context of {hello.max_model_len} tokens "
            f"holds at most {hello.max_model_len - 1} and one to generate"
        )
        raise FailedCall(Failure(400, message, param, "context_length_exceeded"))


def check_total(lengths: list[int], n: int, param: str = "n") -> None:
    """Every sequence carries its prompt to the engine: their sum must not fill the memory."""
    if sum(lengths) * n > MAX_CALL_TOKENS:
        raise RequestError(
            f"{sum(lengths)} prompt tokens x 'n' {n} are too many for one request; "
            f"at most {MAX_CALL_TOKENS}",
            param,
        )


def check_sequences(service: Service, prompts: int, n: int, param: str = "n") -> None:
    most = service.options.max_sequences
    if prompts * n > most:
        raise RequestError(
            f"{prompts} prompts x 'n' {n} are too many; at most {most} sequences (--max-sequences)",
            param,
        )


# --------------------------------------------------------------------------------- encoding


def prompt_list(prompt: Any, param: str) -> list[str | list[int]]:
    """The prompts of a field that holds one or many. Raises RequestError."""
    prompts: list[str | list[int]]
    if isinstance(prompt, str) or (prompt and isinstance(prompt[0], int)):
        prompts = [prompt]
    else:
        prompts = prompt
    if not prompts or any(not p for p in prompts):
        raise RequestError(f"'{param}' must not be empty", param)
    if len(prompts) > MAX_PROMPTS:
        raise RequestError(f"'{param}' holds {len(prompts)} prompts; at most {MAX_PROMPTS}", param)
    return prompts


Encode = Callable[[str | list[int]], Prompt]


def _encoder(tokenizer: TextTokenizer, hello: Hello, body: CompletionBody) -> Encode:
    special, echo = body.add_special_tokens is not False, bool(body.echo)
    hide_special = body.skip_special_tokens is not False

    def encode(prompt: str | list[int]) -> Prompt:
        if isinstance(prompt, str):
            tokens = tokenizer.encode(prompt, add_special_tokens=special)
            return Prompt(tuple(tokens), prompt if echo else "")
        check_ids(prompt, hello.vocab_size, "prompt")
        text = tokenizer.decode(prompt, skip_special_tokens=hide_special) if echo else ""
        return Prompt(tuple(prompt), text)

    return encode


def _middle_encoder(tokenizer: TextTokenizer, body: CompletionBody) -> Encode:
    """prefix token, prompt, suffix token, `suffix`, middle token; what follows is the middle."""
    if body.echo:
        raise RequestError("'echo' together with 'suffix' is not supported", "suffix")
    tokens = [[tokenizer.token_id(text) for text in spelling] for spelling in _MIDDLE_TOKENS]
    found = next((ids for ids in tokens if None not in ids), None)
    if found is None:
        raise RequestError(
            "'suffix' is not supported by this model: its vocabulary has no tokens for filling in "
            "the middle",
            "suffix",
        )
    before, after, middle = (token for token in found if token is not None)
    suffix = tokenizer.encode(body.suffix or "", add_special_tokens=False)

    def encode(prompt: str | list[int]) -> Prompt:
        if not isinstance(prompt, str):
            raise RequestError("'suffix' needs a 'prompt' that is text", "suffix")
        text = tokenizer.encode(prompt, add_special_tokens=False)
        return Prompt((before, *text, after, *suffix, middle))

    return encode


def _truncated(prompt: Prompt, tokenizer: TextTokenizer, hello: Hello, body: Sampling) -> Prompt:
    """Cut the prompt, and its echo with it, to what the body says."""
    tokens = truncated(prompt.tokens, hello, body, max(1, body.max_tokens or 1))
    if len(tokens) == len(prompt.tokens):
        return prompt
    hidden = body.skip_special_tokens is not False
    echo = tokenizer.decode(tokens, skip_special_tokens=hidden) if prompt.echo else ""
    return replace(prompt, tokens=tokens, echo=echo)


def truncated(
    tokens: tuple[int, ...], hello: Hello, body: Sampling | EmbeddingBody, room_tokens: int
) -> tuple[int, ...]:
    """Cut to `truncate_prompt_tokens`; -1 leaves `room_tokens`. Raises RequestError."""
    keep = body.truncate_prompt_tokens
    if keep is None:
        return tokens
    if keep == 0 or keep > hello.max_model_len:
        raise RequestError(
            f"'truncate_prompt_tokens' must be -1 or 1 to {hello.max_model_len}",
            "truncate_prompt_tokens",
        )
    if keep == -1:
        keep = max(1, hello.max_model_len - room_tokens)
    return tokens[:keep] if body.truncation_side == "right" else tokens[-keep:]
