"""Budgets of reasoning in the engine: the tokens of a free run up to the budget, then the forced
end, in any company.

On a tiny random model whose tokens are bytes: the closing mark is `</think>` in letters, or a
single byte where the model shall end its reasoning by itself.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from msgspec import structs

from tests.engine.test_equivalence import STEM, requests, ways
from tests.engine.test_structured import RECORD, answer
from toque.build import Loaded, load
from toque.config import EngineConfig
from toque.files.checkpoint import open_checkpoint
from toque.options import EngineOptions
from toque.serve.tokenizer import load_tokenizer
from toque.structured.budgets import Thought
from toque.types import (
    FinishReason,
    Grammar,
    GrammarKind,
    Request,
    SamplingParams,
    Spellings,
    ThinkingBudget,
)

END = 2
CLOSING = "</think>"


@pytest.fixture(scope="module")
def loaded(tiny_config: Path) -> Loaded:
    return load(tiny_config, EngineOptions(load_format="dummy", kernels="cpu"))


@pytest.fixture(scope="module")
def spellings(tiny_config: Path) -> Spellings:
    return load_tokenizer(open_checkpoint(tiny_config, "dummy")).spellings((END,))


def ids(spellings: Spellings, text: str) -> tuple[int, ...]:
    return tuple(spellings.tokens.index(bytes([byte])) for byte in text.encode())


def budget(
    spellings: Spellings, num_tokens: int, closing: str = CLOSING, is_open: bool = True
) -> ThinkingBudget:
    return ThinkingBudget(
        num_tokens=num_tokens,
        opening="<think>",
        closing=closing,
        closing_ids=ids(spellings, closing),
        is_open=is_open,
    )


def ask(name: str, seed: int = 0, thinking: ThinkingBudget | None = None, **more: Any) -> Request:
    sampling = SamplingParams(
        temperature=1.0, seed=seed, max_tokens=60, ignore_eos=more.get("grammar") is None
    )
    prompt = tuple(STEM[: 10 + 7 * seed])
    return Request(id=name, prompt=prompt, sampling=sampling, arrived_s=0, thinking=thinking,
                   **more)  # fmt: skip


@pytest.mark.parametrize("num_tokens", [0, 1, 7, 51])
def test_after_the_budget_the_end_is_forced_and_the_answer_goes_on(
    loaded: Loaded, spellings: Spellings, num_tokens: int
) -> None:
    mark = list(ids(spellings, CLOSING))
    wanted = [ask(f"{seed}", seed, budget(spellings, num_tokens)) for seed in range(4)]
    free = answer(loaded, spellings, [ask(f"{seed}", seed) for seed in range(4)]).tokens
    for name, tokens in answer(loaded, spellings, wanted).tokens.items():
        assert tokens[:num_tokens] == free[name][:num_tokens], "as free as without a budget"
        assert tokens[num_tokens : num_tokens + len(mark)] == mark
        assert len(tokens) == 60 and CLOSING not in spelled(spellings, tokens[num_tokens + 8 :])


def spelled(spellings: Spellings, tokens: Sequence[int]) -> str:
    return b"".join(spellings.tokens[i] for i in tokens).decode(errors="replace")


def test_reasoning_that_ends_by_itself_is_left_alone(loaded: Loaded, spellings: Spellings) -> None:
    """Whichever byte a free run begins with is taken for the mark: then there is nothing to do."""
    free = answer(loaded, spellings, [ask(f"{seed}", seed) for seed in range(6)]).tokens
    ended = 0
    for seed in range(6):
        plain = free[f"{seed}"]
        for place, token in enumerate(plain[:20]):
            closing = spellings.tokens[token]
            if not (closing.isascii() and closing.decode().isprintable()) or token in plain[:place]:
                continue
            thinking = budget(spellings, place + 1, closing.decode())
            got = answer(loaded, spellings, [ask("x", seed, thinking)]).tokens["x"]
            assert got == plain
            ended += 1
            break
    assert ended >= 3


def test_without_an_opening_mark_there_is_nothing_to_end(
    loaded: Loaded, spellings: Spellings
) -> None:
    thinking = budget(spellings, 0, is_open=False)
    wanted = [ask("with", 1, thinking), ask("without", 1)]
    tokens = answer(loaded, spellings, wanted).tokens
    assert tokens["with"] == tokens["without"]


def bound(spellings: Spellings) -> list[Request]:
    """With budgets alone, and with budgets in front of a schema."""
    late = Grammar(kind=GrammarKind.JSON_SCHEMA, text=json.dumps(RECORD), after=CLOSING)
    made = []
    for seed in range(4):
        made.append(ask(f"free{seed}", seed, budget(spellings, 3 + 5 * seed)))
        one = ask(f"late{seed}", seed, budget(spellings, 4 * seed), grammar=late)
        blanks = {ids(spellings, blank)[0]: -100.0 for blank in " \t\r\n"}
        sampling = structs.replace(one.sampling, max_tokens=120, logit_bias=blanks)
        made.append(structs.replace(one, sampling=sampling))
    return made


@pytest.fixture(scope="module")
def alone(loaded: Loaded, spellings: Spellings) -> dict[str, list[int]]:
    return {
        name: tokens
        for request in [*bound(spellings), *requests()]
        for name, tokens in answer(loaded, spellings, [request]).tokens.items()
    }


@pytest.mark.parametrize(("config", "gap"), ways()[1::3])
def test_the_same_tokens_in_any_company(
    loaded: Loaded,
    spellings: Spellings,
    alone: dict[str, list[int]],
    config: EngineConfig,
    gap: int,
) -> None:
    pairs = zip(bound(spellings), requests(), strict=False)
    wanted = [r for pair in pairs for r in pair] + requests()[8:]
    ran = answer(loaded, spellings, wanted, config, gap)
    assert ran.tokens == alone
    if config.total_pages < 256:
        assert ran.preemptions > 0, "the tight pool was meant to preempt"


def test_a_constraint_begins_after_the_forced_end(loaded: Loaded, spellings: Spellings) -> None:
    ran = answer(loaded, spellings, bound(spellings))
    for seed in range(4):
        tokens = ran.tokens[f"late{seed}"]
        thought, answered = tokens[: 4 * seed], tokens[4 * seed :]
        text = spelled(spellings, [t for t in answered if t != END])
        assert CLOSING not in spelled(spellings, thought) and text.startswith(CLOSING)
        assert list(json.loads(text.removeprefix(CLOSING))) == ["ok", "n", "tag"]
        assert ran.ends[f"late{seed}"].reason is FinishReason.STOP


def test_an_engine_that_knows_no_spellings_fails_that_request(
    loaded: Loaded, spellings: Spellings
) -> None:
    nothing = Spellings(tokens=(), markers=(), end_token_ids=(END,))
    wanted = [ask("lost", 0, budget(spellings, 3)), ask("fine", 1)]
    ran = answer(loaded, nothing, wanted)
    assert ran.ends["lost"].reason is FinishReason.ERROR
    assert "spelled" in (ran.ends["lost"].error or "") and len(ran.tokens["fine"]) == 60


# ------------------------------------------------------------------------- where reasoning begins

PIECES = (
    "<",
    "think",
    ">",
    "</",
    "<think>",
    "</think>",
    "\n",
    "a",
    "b>",
    "é",
    ">x",
    "k</think>y",
)
TABLE = tuple(piece.encode() for piece in PIECES)


def thought(written: str, num_tokens: int, is_open: bool) -> Thought:
    """After these pieces, which are parted by |."""
    closing = (PIECES.index("</think>"),)
    made = Thought(
        ThinkingBudget(num_tokens=num_tokens, opening="<think>", closing=CLOSING,
                       closing_ids=closing, is_open=is_open),
        TABLE,
    )  # fmt: skip
    for piece in written.split("|") if written else ():
        made.take(PIECES.index(piece))
    return made


# What was written, whether the prompt has opened the reasoning; tokens of it (None: it is over).
WRITTEN: list[tuple[str, bool, int | None]] = [
    ("", True, 0),
    ("a|a", True, 2),
    ("\n|<think>", True, 0),  # a prompt that has begun it may see it begun again
    ("\n|<think>|a", True, 1),
    ("<|think|>|\n|a", True, 2),
    ("<|think|>x|a", True, 2),
    ("<|think|a", True, 3),
    ("a|<think>|a", True, 3),  # a mark in the middle is none
    ("a|</think>", True, None),
    ("a|</|think|>", True, None),
    ("a|</|think", True, 3),
    ("a|k</think>y", True, None),
    ("</think>", True, None),
    ("<think>|a|a", False, 2),
    ("\n|\n|<think>|a", False, 1),
    ("<think>|\n|</think>", False, None),
    ("a", False, None),
    ("<|a", False, None),
    ("<think>", False, 0),
]


@pytest.mark.parametrize(("written", "is_open", "spent"), WRITTEN)
def test_tokens_between_the_marks_count(written: str, is_open: bool, spent: int | None) -> None:
    found = thought(written, 99, is_open)
    assert found.due is None and found.over == (spent is None)
    if spent is not None:
        assert found.spent == spent
        if spent and not (is_open and "think" in written):
            assert thought(written, spent, is_open).due == PIECES.index("</think>")
            assert thought(written, spent + 1, is_open).due is None
    undecided = thought("\n", 0, False)
    assert undecided.due is None and not undecided.over, "blanks before a mark are no reasoning"
