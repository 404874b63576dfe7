"""Where chat templates run: Jinja's immutable sandbox, with an end to time and to sizes.

Owns: each thread's deadline. Knows: Jinja's syntax tree. Does not know: messages, dialects.

Jinja's sandbox keeps a template from attributes it should not see; it does not keep it from running
for ever. Here every turn of a loop and every call looks at the clock, and a product may not be
larger than what a template could print.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import jinja2
from jinja2 import nodes
from jinja2.sandbox import ImmutableSandboxedEnvironment

MAX_PRODUCT = 1 << 20  # elements of a repeated text or list; bits of a power's result
_CLOCK_EVERY = 64  # turns of a loop between two looks at the clock


class TooLong(jinja2.TemplateError):
    """The template used up its time."""


class TimedSandbox(ImmutableSandboxedEnvironment):
    intercepted_binops = frozenset({"*", "**"})

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self._running = threading.local()

    @contextmanager
    def limited(self, seconds: float) -> Iterator[None]:
        """What this thread renders inside the block raises TooLong after so many seconds."""
        self._running.deadline_s = time.monotonic() + seconds
        try:
            yield
        finally:
            del self._running.deadline_s

    def check_time(self) -> None:
        deadline_s = getattr(self._running, "deadline_s", None)
        if deadline_s is not None and time.monotonic() > deadline_s:
            raise TooLong("it took too long")

    def timed(self, items: Iterable[Any]) -> _Timed:
        return _Timed(items, self)

    def _parse(self, source: str, name: str | None, filename: str | None) -> nodes.Template:
        tree = super()._parse(source, name, filename)
        for loop in tree.find_all(nodes.For):
            clock = nodes.EnvironmentAttribute("timed")
            loop.iter = nodes.Call(clock, [loop.iter], [], None, None).set_lineno(loop.lineno)
        return tree

    def call(self, context: Any, callable_: Any, /, *args: Any, **kwargs: Any) -> Any:
        self.check_time()
        return super().call(context, callable_, *args, **kwargs)

    def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
        too_large = _power_bits if operator == "**" else _product_size
        if too_large(left, right) > MAX_PRODUCT:
            raise jinja2.TemplateError(f"the result of {operator} is too large")
        return super().call_binop(context, operator, left, right)


class _Timed(list[Any]):
    """A loop's items, which are counted as they are handed out."""

    def __init__(self, items: Iterable[Any], sandbox: TimedSandbox) -> None:
        super().__init__(items)
        self._sandbox = sandbox

    def __iter__(self) -> Iterator[Any]:
        for place, item in enumerate(super().__iter__()):
            if place % _CLOCK_EVERY == 0:
                self._sandbox.check_time()
            yield item


def _product_size(left: Any, right: Any) -> int:
    for many, times in ((left, right), (right, left)):
        if isinstance(times, int) and hasattr(many, "__len__"):
            return len(many) * max(0, times)
    return 0


def _power_bits(base: Any, exponent: Any) -> int:
    if isinstance(base, int) and isinstance(exponent, int):
        return base.bit_length() * max(0, exponent)
    return 0
