"""The implemented request fields, their types and ranges; from bytes to a checked body.

Owns: the pydantic models. Knows: JSON, ranges, the field tables. Does not know: tokens, the engine.

Bodies are read strictly (a string is no number); the browser's GET form is read with coercion.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal, TypeVar

import msgspec
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from toque.errors import RequestError
from toque.serve import fields
from toque.serve.failures import short

MAX_CHOICES = 128
MAX_PROMPTS = 1024
MAX_STOP_CHARS = 1024
MAX_STOP_TOKEN_IDS = 256
MAX_BAD_WORDS = 128
MAX_SALT_CHARS = 256
MAX_LOGPROBS = 20

# A long list of wrong things costs one error, not one per element.
_FAST = Field(fail_fast=True)
TokenIds = Annotated[list[int], _FAST]
Texts = Annotated[list[str], _FAST]
Messages = Annotated[list[dict[str, Any]], _FAST]
Effort = Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"]
PromptField = str | TokenIds | Texts | Annotated[list[TokenIds], _FAST]


class StreamOptions(BaseModel):
    model_config = ConfigDict(extra="forbid")

    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None


class Drawing(BaseModel):
    """How tokens are chosen: what all generating routes share. Null means the default."""

    model_config = ConfigDict(extra="forbid", allow_inf_nan=False)

    model: str | None = Field(None, description="A served name; absent = the served model.")
    temperature: float | None = Field(None, ge=0, le=2, description="0 = greedy; default 1.")
    top_p: float | None = Field(None, gt=0, le=1)
    top_k: int | None = Field(None, ge=-1, description="0 or -1 = off.")
    min_p: float | None = Field(None, ge=0, le=1)
    seed: int | None = Field(None, ge=-(2**63), lt=2**63)
    stop: str | Texts | None = Field(None, description="At most --max-stop-strings of them.")
    include_stop_str_in_output: bool | None = None
    stop_token_ids: TokenIds | None = None
    ignore_eos: bool | None = None
    min_tokens: int | None = Field(None, ge=0)
    repetition_penalty: float | None = Field(None, gt=0, le=100)
    presence_penalty: float | None = Field(None, ge=-2, le=2)
    frequency_penalty: float | None = Field(None, ge=-2, le=2)
    logit_bias: dict[str, Any] | None = Field(None, description="Token id: bias, -100 to 100.")
    bad_words: Texts | None = Field(None, description="Texts that the output may not contain.")
    allowed_token_ids: TokenIds | None = Field(None, min_length=1)
    cache_salt: str | None = Field(None, min_length=1, max_length=MAX_SALT_CHARS)
    priority: int | None = Field(None, ge=-(2**31), lt=2**31, description="Lower comes first.")
    slo: str | None = Field(
        None, max_length=64, description="Class of service; else the X-SLO-Class header's."
    )
    request_id: str | None = Field(None, description="Names the answer; unique among open calls.")
    skip_special_tokens: bool | None = Field(None, description="Default true.")
    structured_outputs: dict[str, Any] | None = Field(
        None, description="One of json, json_object, regex, choice, grammar (Lark)."
    )


class Sampling(Drawing):
    """What completions and chat share beside that."""

    max_tokens: int | None = Field(None, ge=1, description="Cut to what the context leaves.")
    n: int | None = Field(None, ge=1, le=MAX_CHOICES)
    prompt_logprobs: int | None = Field(None, ge=0, le=MAX_LOGPROBS, description="Not streamed.")
    truncate_prompt_tokens: int | None = Field(
        None, ge=-1, description="Keep so many tokens of the prompt; -1 = what fits."
    )
    truncation_side: Literal["left", "right"] | None = Field(None, description="Default left.")
    return_tokens_as_token_ids: bool | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    return_token_ids: bool | None = None
    response_format: dict[str, Any] | None = Field(
        None, description="text, json_object, or json_schema with a schema."
    )


class CompletionBody(Sampling):
    prompt: PromptField
    max_tokens: int | None = Field(None, ge=0, description="Default 16; 0 only reads the prompt.")
    suffix: str | None = Field(None, description="Text after the gap that the model fills.")
    add_special_tokens: bool | None = Field(None, description="Default true.")
    logprobs: int | None = Field(None, ge=0, le=MAX_LOGPROBS)
    echo: bool | None = None


class ChatBody(Sampling):
    messages: Messages = Field(min_length=1)
    max_completion_tokens: int | None = Field(None, ge=1)
    logprobs: bool | None = None
    top_logprobs: int | None = Field(None, ge=0, le=MAX_LOGPROBS)
    add_generation_prompt: bool | None = Field(None, description="Default true.")
    continue_final_message: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    tools: list[Any] | None = Field(None, description="Functions; `strict` ones are enforced.")
    tool_choice: str | dict[str, Any] | None = Field(
        None, description="none, auto (default with tools), required, or a function by name."
    )
    parallel_tool_calls: bool | None = Field(None, description="False = at most one call.")
    reasoning_effort: Effort | None = Field(None, description="As far as the template knows it.")
    include_reasoning: bool | None = Field(None, description="Default true.")
    thinking_token_budget: int | None = Field(
        None, ge=0, description="Reasoning ends after so many tokens; where the model has one."
    )


class ResponsesBody(Drawing):
    input: str | list[Any] = Field(description="A text, or messages, calls and their outputs.")
    instructions: str | None = Field(None, description="Not carried on to the next response.")
    previous_response_id: str | None = None
    store: bool | None = Field(None, description="Default true.")
    stream: bool | None = None
    stream_options: dict[str, Any] | None = None
    max_output_tokens: int | None = Field(None, ge=1, description="Cut to what the context leaves.")
    metadata: dict[str, Any] | None = None
    text: dict[str, Any] | None = Field(None, description="{format}: text or json_schema.")
    reasoning: dict[str, Any] | None = Field(None, description="{effort}")
    thinking_token_budget: int | None = Field(
        None, ge=0, description="Reasoning ends after so many tokens; where the model has one."
    )
    tools: list[Any] | None = Field(None, description="Functions.")
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = Field(None, description="False = at most one call.")
    chat_template_kwargs: dict[str, Any] | None = None


class EmbeddingBody(BaseModel):
    """One vector of length 1 for each input."""

    model_config = ConfigDict(extra="forbid")

    model: str | None = Field(None, description="A served name; absent = the served model.")
    input: PromptField = Field(description="Text, token ids, or a list of either.")
    encoding_format: Literal["float", "base64"] | None = Field(
        None, description="Default float; base64 is of little-endian float32."
    )
    pooling: Literal["last", "mean"] | None = Field(
        None, description="Which token's state: the last one's (default), or the mean of all."
    )
    add_special_tokens: bool | None = Field(None, description="Default true.")
    truncate_prompt_tokens: int | None = Field(
        None, ge=-1, description="Keep so many tokens of each input; -1 = what fits."
    )
    truncation_side: Literal["left", "right"] | None = Field(None, description="Default left.")
    cache_salt: str | None = Field(None, min_length=1, max_length=MAX_SALT_CHARS)
    priority: int | None = Field(None, ge=-(2**31), lt=2**31, description="Lower comes first.")
    request_id: str | None = Field(None, description="Unique among open calls.")


class TokenizeBody(BaseModel):
    """Either `prompt` or `messages`."""

    model_config = ConfigDict(extra="forbid")

    model: str | None = None
    prompt: str | None = None
    messages: Messages | None = Field(None, min_length=1)
    add_special_tokens: bool | None = Field(None, description="Default: true with a prompt.")
    add_generation_prompt: bool | None = Field(None, description="Default true; messages only.")
    continue_final_message: bool | None = Field(None, description="Messages only.")
    chat_template_kwargs: dict[str, Any] | None = None
    tools: list[Any] | None = Field(None, description="Messages only.")
    return_token_strs: bool | None = None


class DetokenizeBody(BaseModel):
    model_config = ConfigDict(extra="forbid")

    model: str | None = None
    tokens: TokenIds


AnyBody = TypeVar("AnyBody", bound=BaseModel)

RULES: dict[type[BaseModel], fields.Rules] = {
    CompletionBody: fields.COMPLETION_RULES,
    ChatBody: fields.CHAT_RULES,
    ResponsesBody: fields.RESPONSES_RULES,
    EmbeddingBody: fields.EMBEDDING_RULES,
    TokenizeBody: fields.TOKENIZE_RULES,
    DetokenizeBody: {},
}

# A union's own error names every branch; these say it in one phrase.
_UNIONS = {
    **dict.fromkeys(
        ("prompt", "input"), "must be a string, a list of strings, token ids or lists of token ids"
    ),
    "stop": "must be a string or a list of strings",
    "tool_choice": "must be 'none', 'auto', 'required' or an object that names a function",
}


def decode_json(body: bytes, max_depth: int = 64) -> dict[str, Any]:
    """The object in a request body.

    Raises:
        RequestError: empty, not JSON (with the position), nested too deeply, or not an object.
    """
    if not body.strip():
        raise RequestError("the request body is empty; send a JSON object")
    try:
        data = msgspec.json.decode(body)
    except RecursionError:
        raise _too_deep(max_depth) from None
    except ValueError as error:
        raise RequestError(
            f"the request body is not valid JSON: {_position(error, body)}"
        ) from None
    if not isinstance(data, dict):
        raise RequestError("the request body must be a JSON object")
    if body.count(b"[") + body.count(b"{") > max_depth and _is_deeper(data, max_depth):
        raise _too_deep(max_depth)
    return data


def _too_deep(max_depth: int) -> RequestError:
    return RequestError(f"the JSON is nested too deeply; at most {max_depth} (--max-json-depth)")


def _is_deeper(value: Any, max_depth: int) -> bool:
    level = [value]
    for _ in range(max_depth):
        level = [
            inner
            for outer in level
            for inner in (outer.values() if isinstance(outer, dict) else outer)
            if isinstance(inner, dict | list)
        ]
        if not level:
            return False
    return True


def _position(error: ValueError, body: bytes) -> str:
    """msgspec names the byte of a syntax error only; find the others' place here."""
    if "(byte " in str(error):
        return str(error)
    try:
        body.decode("utf-8")
    except UnicodeDecodeError as wrong:
        return f"invalid UTF-8 (byte {wrong.start})"
    if "truncated" in str(error):
        return f"it ends too early (byte {len(body)})"
    return str(error)


def check(
    body: type[AnyBody], data: Mapping[str, Any], lenient: bool = False, strict: bool = True
) -> AnyBody:
    """A body of checked types and ranges; `lenient` leaves out fields that nobody knows.

    Raises:
        RequestError: the first field at fault, by name.
    """
    rules = RULES[body]
    kept = fields.screen(data, body.model_fields, rules, "", lenient)
    options = kept.get("stream_options")
    if isinstance(options, dict) and body is not ResponsesBody:
        known = StreamOptions.model_fields
        kept["stream_options"] = fields.screen(
            options, known, fields.STREAM_OPTION_RULES, "stream_options.", lenient
        )
    try:
        return body.model_validate(kept, strict=strict)
    except ValidationError as error:
        raise _request_error(error) from None


def _request_error(error: ValidationError) -> RequestError:
    first = error.errors(include_url=False, include_context=False, include_input=False)[0]
    location = first["loc"]
    name = str(location[0])
    if first["type"] == "missing":
        return RequestError(f"'{name}' is required", name)
    if name in _UNIONS:
        return RequestError(f"'{name}' {_UNIONS[name]}", name)
    path = short(_path(location))
    message = first["msg"].replace("Input should be", "must be").replace("Input", "input")
    return RequestError(f"'{path}' {message}", path)


def _path(location: tuple[int | str, ...]) -> str:
    parts = [f"[{part}]" if isinstance(part, int) else f".{part}" for part in location]
    return "".join(parts).removeprefix(".")


def query_data(pairs: list[tuple[str, str]]) -> dict[str, Any]:
    """The browser form's fields: repeated keys are a list, the rest are strings to be coerced."""
    grouped: dict[str, list[str]] = {}
    for name, value in pairs:
        grouped.setdefault(name, []).append(value)
    always_lists = {"stop_token_ids", "allowed_token_ids", "bad_words"}
    return {
        name: values if len(values) > 1 or name in always_lists else values[0]
        for name, values in grouped.items()
    }
