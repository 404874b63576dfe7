"""A request's grammar is compiled here before the request is accepted.

Owns: the text side's compiler and its thread, whether the engine knows the vocabulary.
Knows: the engine client, the tokenizer. Does not know: bodies, fields.

The engine compiles again what has passed here, so it meets no grammar that is wrong or too large.
One is compiled at a time: whoever sends monsters holds up others who bring new grammars, for as
long as llguidance's own limits let a monster live, and nobody else.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any, TypeVar

from toque.errors import RequestError
from toque.serve.frontend import EngineClient
from toque.types import Grammar, Hello, Spellings, TokenId

if TYPE_CHECKING:
    from toque.serve.service import TextTokenizer
    from toque.structured.grammar import Compiler

T = TypeVar("T")
CHECK_S = 10.0  # what one grammar may take; the largest that the limits allow take about half


class GrammarCheck:
    def __init__(self, client: EngineClient) -> None:
        self._client = client
        self._compiler: Compiler | None = None
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="toque-grammar")
        self._turn = asyncio.Lock()
        self._overdue: asyncio.Future[Any] | None = None

    def close(self) -> None:
        self._thread.shutdown(wait=False, cancel_futures=True)

    async def check(
        self, grammar: Grammar, param: str, hello: Hello, tokenizer: TextTokenizer
    ) -> None:
        """Raises RequestError, naming `param`, with the reason and the place; after this the
        engine takes requests with this grammar."""
        if self._compiler is not None and self._compiler.knows(grammar):
            return
        async with self._turn:
            if self._overdue is not None:
                await asyncio.wait({self._overdue})
            compiler = await self._ready(hello, tokenizer)
            work = self._run(compiler.matcher, grammar)
            done, _ = await asyncio.wait({work}, timeout=CHECK_S)
            self._overdue = None if done else work
        if not done:
            raise RequestError(f"'{param}' takes more than {CHECK_S:g} s to compile", param)
        try:
            work.result()
        except RequestError as error:
            raise RequestError(f"'{param}' cannot be used: {error}", param) from None

    async def may_begin(
        self, grammar: Grammar, texts: Collection[str], hello: Hello, tokenizer: TextTokenizer
    ) -> bool:
        """Whether an output of a grammar that has passed `check` may begin with one of these."""
        async with self._turn:
            compiler = await self._ready(hello, tokenizer)
            return await self._run(_may_begin, compiler, grammar, texts)

    async def markers(self, hello: Hello, tokenizer: TextTokenizer) -> dict[str, TokenId]:
        """Ids of the marker tokens by text, for grammars that name them."""
        async with self._turn:
            return (await self._ready(hello, tokenizer)).markers

    async def _ready(self, hello: Hello, tokenizer: TextTokenizer) -> Compiler:
        if self._compiler is None:
            spellings = await self._run(tokenizer.spellings, hello.end_token_ids)
            self._client.teach(spellings)  # the engine builds its own meanwhile
            self._compiler = await self._run(_compiler, spellings)
        return self._compiler

    def _run(self, work: Callable[..., T], *args: Any) -> asyncio.Future[T]:
        return asyncio.get_running_loop().run_in_executor(self._thread, work, *args)


def _may_begin(compiler: Compiler, grammar: Grammar, texts: Collection[str]) -> bool:
    return any(compiler.may_begin(grammar, text) for text in texts)


def _compiler(spellings: Spellings) -> Compiler:
    from toque.structured.grammar import Compiler

    return Compiler(spellings)
