"""`toque run` and `toque chat`: a model in the terminal, without a server."""

from __future__ import annotations

import argparse
import dataclasses
import sys
from typing import Any

from toque.files.fetch import locate
from toque.files.progress import terminal_progress
from toque.llm import LLM
from toque.options import EngineOptions
from toque.types import SamplingParams


def _open(model: str, options: EngineOptions) -> LLM:
    locate(model, progress=terminal_progress())
    return LLM(model, **dataclasses.asdict(options))


def _sampling(arguments: argparse.Namespace) -> SamplingParams:
    return SamplingParams(
        max_tokens=arguments.max_tokens,
        temperature=arguments.temperature,
        top_p=arguments.top_p,
        seed=arguments.seed,
    )


def complete(arguments: argparse.Namespace, options: EngineOptions) -> int:
    """One prompt, one answer on standard output."""
    prompt = sys.stdin.read() if arguments.prompt == "-" else arguments.prompt
    llm = _open(arguments.model, options)
    messages = [{"role": "user", "content": prompt}]
    raw = arguments.raw or llm.tokenizer.chat is None
    _show(llm, prompt if raw else llm.tokenizer.encode_chat(messages), _sampling(arguments))
    return 0


def chat(arguments: argparse.Namespace, options: EngineOptions) -> int:
    """A conversation: one line in, one answer out. Ctrl-C ends an answer, Ctrl-D the talk."""
    llm = _open(arguments.model, options)
    messages: list[dict[str, Any]] = []
    if arguments.system:
        messages.append({"role": "system", "content": arguments.system})
    print("Ctrl-D ends the conversation, Ctrl-C an answer.", file=sys.stderr)
    while True:
        try:
            line = input("> ")
        except EOFError:
            return 0
        if not line.strip():
            continue
        messages.append({"role": "user", "content": line})
        answer = _show(llm, llm.tokenizer.encode_chat(messages), _sampling(arguments))
        messages.append({"role": "assistant", "content": answer})


def _show(llm: LLM, prompt: str | list[int], sampling: SamplingParams) -> str:
    """Print an answer while it is made; returns what there is of it, also after Ctrl-C."""
    text = ""
    pieces = llm.stream(prompt, sampling)
    try:
        for piece in pieces:
            text += piece
            print(piece, end="", flush=True)
    except KeyboardInterrupt:
        pieces.close()  # type: ignore[attr-defined]
    print()
    return text
