"""Every request field that is not implemented: refused by name, or a no-op by its own contract.

Owns: the table. Knows: which fields OpenAI and vLLM define and their neutral values.
Does not know: the implemented fields (schema.py) or what any of them does.

Three classes of fields and no fourth: implemented; here as `Refused` (its neutral values, which ask
for nothing, are accepted); here as `NoOp` (does nothing on this server, by contract). A field
that is in none of them is refused as unknown.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

from toque.errors import RequestError
from toque.serve.failures import short


@dataclass(frozen=True, slots=True)
class Refused:
    """Known and not supported; `neutral` values ask for nothing and pass."""

    neutral: tuple[Any, ...] = (None,)
    instead: str = ""  # what to use

    def accepts(self, value: Any) -> bool:
        return _is_one_of(value, self.neutral)


@dataclass(frozen=True, slots=True)
class NoOp:
    """Accepted and without effect: `values` (empty = any value of `kind`), or null."""

    kind: type
    values: tuple[Any, ...] = ()

    def accepts(self, value: Any) -> bool:
        if value is None:
            return True
        if self.values:
            return _is_one_of(value, self.values)
        return isinstance(value, self.kind)


Rule = Refused | NoOp
Rules = Mapping[str, Rule]

NO_OPS: dict[str, Rule] = {
    "user": NoOp(str),  # a label for the operator's abuse reports; there are none here
    "metadata": NoOp(dict),  # labels of stored answers; nothing is stored
    "store": NoOp(bool, (False,)),  # true would promise storage
    "service_tier": NoOp(str, ("auto", "default")),  # flex and priority would mean something
    "safety_identifier": NoOp(str),
    "prompt_cache_key": NoOp(str),  # a routing hint; the prefix cache needs none
    "prompt_cache_retention": NoOp(str, ("in_memory", "in-memory")),
}

_BOTH: dict[str, Rule] = {
    **NO_OPS,
    "guided_json": Refused(instead="structured_outputs.json"),
    "guided_regex": Refused(instead="structured_outputs.regex"),
    "guided_choice": Refused(instead="structured_outputs.choice"),
    "guided_grammar": Refused(instead="structured_outputs.grammar"),
    "guided_json_object": Refused((None, False), instead="structured_outputs.json_object"),
    "guided_whitespace_pattern": Refused(),
    "guided_decoding_backend": Refused(),
    "structural_tag": Refused(),
    "grammar": Refused(instead="structured_outputs.grammar"),  # llama.cpp's names
    "json_schema": Refused(instead="structured_outputs.json"),
    "use_beam_search": Refused((None, False)),
    "length_penalty": Refused((None, 1.0)),
    "spaces_between_special_tokens": Refused((None, True)),
    "logprob_token_ids": Refused(),
    "prompt_embeds": Refused(),
    "session_id": Refused(),
    "return_token_offsets": Refused((None, False)),
    "kv_transfer_params": Refused(),
    "ec_transfer_params": Refused(),
    "vllm_xargs": Refused((None, {})),
    "repetition_detection": Refused(),
    "stream_interval": Refused((None, 1)),
    "watermarking": Refused((None, False)),
    "routed_experts_prompt_start": Refused(),
}

COMPLETION_RULES: Rules = {
    **_BOTH,
    "thinking_token_budget": Refused(),  # such an answer is text, with no reasoning told apart
    "best_of": Refused((None, 1)),
}

CHAT_RULES: Rules = {
    **_BOTH,
    "functions": Refused((None, [])),
    "function_call": Refused((None, "none", "auto")),
    "modalities": Refused((None, ["text"])),
    "audio": Refused(),
    "prediction": Refused(),
    "prompt_cache_options": Refused((None, {"mode": "implicit"})),
    "moderation": Refused(),
    "verbosity": Refused(),
    "web_search_options": Refused(),
    "echo": Refused((None, False)),
    "add_special_tokens": Refused((None, False)),
    "documents": Refused((None, [])),
    "chat_template": Refused(),
    "mm_processor_kwargs": Refused((None, {})),
    "media_io_kwargs": Refused((None, {})),
    "return_prompt_text": Refused((None, False)),
}

# Clients send assistant messages back as they got them, absent parts as null.
MESSAGE_RULES: Rules = {
    "tool_calls": Refused((None, [])),  # of other roles than assistant
    "tool_call_id": Refused(),  # of other roles than tool
    "function_call": Refused(),
    "refusal": Refused(),
    "audio": Refused(),
    "annotations": Refused((None, [])),
    "parsed": NoOp(object),  # what openai-python makes of the content
    "reasoning": Refused(),
    "reasoning_content": Refused(),
}

# A call that was put together from a stream has these beside what OpenAI's own form has.
CALL_RULES: Rules = {"index": NoOp(int)}
CALL_FUNCTION_RULES: Rules = {"parsed_arguments": NoOp(object)}

RESPONSES_RULES: Rules = {
    "user": NoOp(str),
    "service_tier": NoOp(str, ("auto", "default")),
    "safety_identifier": NoOp(str),
    "prompt_cache_key": NoOp(str),
    "prompt_cache_retention": NoOp(str, ("in_memory", "in-memory")),
    "background": Refused((None, False)),
    "background_options": Refused(),
    "conversation": Refused(),
    "context_management": Refused(),
    "include": Refused((None, [])),
    "max_tool_calls": Refused(),
    "moderation": Refused(),
    "prompt": Refused(),
    "prompt_cache_options": Refused(),
    "top_logprobs": Refused((None, 0)),
    "truncation": Refused((None, "disabled")),
    "response_format": Refused(instead="text.format"),
    "max_tokens": Refused(instead="max_output_tokens"),
    "max_completion_tokens": Refused(instead="max_output_tokens"),
    "messages": Refused(instead="input"),
    "reasoning_effort": Refused(instead="reasoning.effort"),
    "n": Refused((None, 1)),
    "logprobs": Refused((None, False)),
    "image": Refused(),
    "access_programs": Refused(),
}

STREAM_OPTION_RULES: Rules = {"include_obfuscation": Refused((None, False))}

TOKENIZE_RULES: Rules = {
    "chat_template": Refused(),
    "mm_processor_kwargs": Refused((None, {})),
    "media_io_kwargs": Refused((None, {})),
}


EMBEDDING_RULES: Rules = {
    "user": NO_OPS["user"],
    "dimensions": Refused(),  # sound only for models that were trained to be cut
    "messages": Refused(),
    "normalize": Refused((None, True)),
    "use_activation": Refused((None, True)),
    "embed_dtype": Refused((None, "float32")),
    "endianness": Refused((None, "native", "little")),
    "additional_data": Refused(),
    "mm_processor_kwargs": Refused((None, {})),
}


def screen(
    data: Mapping[str, Any],
    implemented: Collection[str],
    rules: Rules,
    where: str = "",
    lenient: bool = False,
) -> dict[str, Any]:
    """The implemented fields of `data`; `where` is the path of `data` in the body.

    `lenient` leaves unknown fields out (--allow-unknown-fields); known ones are still refused.

    Raises:
        RequestError: a field that is unknown, or refused with a value that is not neutral.
    """
    kept: dict[str, Any] = {}
    for name, value in data.items():
        if name in implemented:
            kept[name] = value
        elif name in rules or not lenient:
            _judge(where + short(name), value, rules.get(name))
    return kept


def _judge(path: str, value: Any, rule: Rule | None) -> None:
    if rule is None:
        raise RequestError(f"unknown field '{path}'", path)
    if rule.accepts(value):
        return
    if isinstance(rule, Refused):
        hint = f"; use '{rule.instead}'" if rule.instead else ""
        raise RequestError(f"'{path}' is not supported{hint}", path)
    allowed = ", ".join(repr(v) for v in rule.values) or f"a value of type {rule.kind.__name__}"
    raise RequestError(f"'{path}' has no effect on this server; accepted: {allowed}", path)


def _is_one_of(value: Any, allowed: tuple[Any, ...]) -> bool:
    # In Python True == 1; in JSON they are different values.
    return any(value == a and isinstance(value, bool) == isinstance(a, bool) for a in allowed)
