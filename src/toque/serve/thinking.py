"""`thinking_token_budget`: how many tokens an answer's reasoning may take.

Owns: nothing. Knows: the field, how the served model marks its reasoning. Does not know: how the
end is forced (structured/budgets.py).
"""

from __future__ import annotations

from toque.errors import RequestError
from toque.serve.prompts import Prompt
from toque.serve.service import Service
from toque.serve.tools.output import REASONING_PARSERS
from toque.types import ThinkingBudget

_PARAM = "thinking_token_budget"


async def thinking_budget(
    service: Service, num_tokens: int | None, prompt: Prompt
) -> ThinkingBudget | None:
    """None: no budget, or no reasoning that could need one. The engine knows the spellings after
    this. Raises RequestError where the model's reasoning has no known form."""
    if num_tokens is None:
        return None
    hello, tokenizer = service.require_ready()
    name = service.formats(tokenizer).reasoning
    if name is None:
        raise RequestError(
            f"'{_PARAM}' is not supported by this model: its chat template has no reasoning "
            "(--reasoning-parser tells how it is marked)",
            _PARAM,
        )
    if prompt.thinking == "closed":
        return None
    await service.grammars.markers(hello, tokenizer)
    opening, closing = REASONING_PARSERS[name]
    mark = tokenizer.token_id(closing)
    spelled = tokenizer.encode(closing, add_special_tokens=False, parse_special=False)
    return ThinkingBudget(
        num_tokens=num_tokens,
        opening=opening,
        closing=closing,
        closing_ids=tuple(spelled) if mark is None else (mark,),
        is_open=prompt.thinking == "open",
    )
