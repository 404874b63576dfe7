"""The `toque` command: flags and dispatch. Imports nothing heavy, so that --help is instant.

Flags are made from the fields of EngineOptions and ServeOptions: a field is a flag, a keyword of
`LLM` and a row of README's table, and there is one place to change it.
"""

from __future__ import annotations

import argparse
import dataclasses
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from toque import __version__
from toque.errors import ToqueError
from toque.files.catalog import DEFAULT_MODEL
from toque.options import EngineOptions, ListenOptions, ServeOptions, parse_size

MODEL_HELP = (
    "catalogue name (qwen2.5-coder-0.5b, smollm2), Hugging Face repo id, folder or .gguf file"
)

PARSERS = ("tool_call_parser", "reasoning_parser")  # of a server: they shape its answers


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; returns its exit code. 2 = wrong usage or a choice that cannot work."""
    arguments = parser().parse_args(argv)
    try:
        return run(arguments)
    except ToqueError as error:
        print(f"toque: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("toque: interrupted", file=sys.stderr)
        return 130


def run(arguments: argparse.Namespace) -> int:
    """Dispatch; each command is imported only here."""
    if arguments.command == "serve":
        from toque.commands.serve import serve

        return serve(
            arguments.model, _options(EngineOptions, arguments), _options(ServeOptions, arguments)
        )
    if arguments.command == "engine":
        from toque.commands.engine import engine

        return engine(
            arguments.model, _options(EngineOptions, arguments), _options(ListenOptions, arguments)
        )
    if arguments.command == "pull":
        from toque.commands.pull import pull

        return pull(arguments.model)
    if arguments.command == "verify":
        from toque.commands.verify import verify

        parsers = {name: getattr(arguments, name) for name in PARSERS}
        return verify(
            (arguments.request, arguments.response),
            arguments.model,
            _options(EngineOptions, arguments),
            ServeOptions(port=0, allow_unknown_fields=True, **parsers),
        )
    if arguments.command == "replay":
        from toque.commands.replay import replay

        return replay(arguments.recording, arguments.model)
    if arguments.command in ("run", "chat"):
        from toque.commands.talk import chat, complete

        talk = complete if arguments.command == "run" else chat
        return talk(arguments, _options(EngineOptions, arguments))
    from toque.bench.naive import main as bench_naive

    return bench_naive(arguments, _options(EngineOptions, arguments))


def parser() -> argparse.ArgumentParser:
    top = argparse.ArgumentParser(
        prog="toque", description="An inference engine for large language models."
    )
    top.add_argument("--version", action="version", version=f"toque {__version__}")
    commands = top.add_subparsers(dest="command", required=True, metavar="COMMAND")

    serve = _command(commands, "serve", "serve a model over the OpenAI API")
    serve.add_argument("model", nargs="?", default=DEFAULT_MODEL, help=MODEL_HELP)
    _add_flags(serve, ServeOptions)
    _add_flags(serve, EngineOptions)

    engine = _command(commands, "engine", "run an engine that a server on another host uses")
    engine.add_argument("model", nargs="?", default=DEFAULT_MODEL, help=MODEL_HELP)
    _add_flags(engine, ListenOptions)
    _add_flags(engine, EngineOptions)

    run_ = _command(commands, "run", "answer one prompt and end")
    run_.add_argument("model", help=MODEL_HELP)
    run_.add_argument("prompt", help="the text to answer (- reads standard input)")
    run_.add_argument("--raw", action="store_true", help="complete the text, no chat template")

    chat = _command(commands, "chat", "talk to a model in the terminal")
    chat.add_argument("model", nargs="?", default=DEFAULT_MODEL, help=MODEL_HELP)
    chat.add_argument("--system", help="a system message")
    for talk in (run_, chat):
        _add_sampling(talk)
        _add_flags(talk, EngineOptions)

    pull = _command(commands, "pull", "fetch a model and check it")
    pull.add_argument("model", nargs="?", default=DEFAULT_MODEL, help=MODEL_HELP)

    verify = _command(commands, "verify", "make a saved answer again: equal (0), or not (1)")
    verify.add_argument("request", type=Path, help="the request, or both in one file (docs/api.md)")
    verify.add_argument("response", type=Path, nargs="?", help="the response, as curl printed it")
    verify.add_argument("--model", help="where the model is [as the response names it]")
    for field in dataclasses.fields(ServeOptions):
        if field.name in PARSERS:
            _add_flag(verify, field)
    _add_flags(verify, EngineOptions)
    replay = _command(commands, "replay", "run a recording again and compare every plan")
    replay.add_argument("recording", help="a file of `toque serve --record`")
    replay.add_argument("--model", help="compute the steps on this model too: " + MODEL_HELP)

    bench = _command(commands, "bench", "measure this machine")
    kinds = bench.add_subparsers(dest="bench", required=True, metavar="BENCH")
    naive = _command(kinds, "naive", "the engine against a plain one-at-a-time loop")
    naive.add_argument("model", nargs="?", default="smollm2", help=MODEL_HELP)
    naive.add_argument("--requests", type=int, default=16, help="how many requests (16)")
    naive.add_argument("--prompt-tokens", type=int, default=64, help="tokens per prompt (64)")
    naive.add_argument("--output-tokens", type=int, default=64, help="tokens per answer (64)")
    _add_flags(naive, EngineOptions)
    return top


def _command(commands: Any, name: str, help: str) -> argparse.ArgumentParser:
    made: argparse.ArgumentParser = commands.add_parser(name, help=help, description=help)
    return made


def _add_sampling(command: argparse.ArgumentParser) -> None:
    command.add_argument("--max-tokens", type=int, default=512, help="longest answer, tokens (512)")
    command.add_argument("--temperature", type=float, default=0.7, help="0 = greedy (0.7)")
    command.add_argument("--top-p", type=float, default=1.0, help="nucleus sampling (1 = off)")
    command.add_argument("--seed", type=int, help="repeat an answer exactly")


def _add_flags(command: argparse.ArgumentParser, options: type[Any]) -> None:
    group = command.add_argument_group(options.__name__.removesuffix("Options").lower())
    for field in dataclasses.fields(options):
        _add_flag(group, field)


def _add_flag(group: Any, field: dataclasses.Field[Any]) -> None:
    flag, help_text = "--" + field.name.replace("_", "-"), field.metadata["help"]
    if isinstance(field.default, (int, float, str)) and not isinstance(field.default, bool):
        help_text += f" [{field.default}]"
    default = list(field.default) if isinstance(field.default, tuple) else field.default
    group.add_argument(flag, default=default, help=help_text, **_kind(field))


def _kind(field: dataclasses.Field[Any]) -> dict[str, Any]:
    """argparse's description of a field's type. `field.type` is text: annotations are deferred."""
    if field.metadata.get("size"):
        return {"type": _size, "metavar": "BYTES"}
    if "choices" in field.metadata:
        return {"choices": field.metadata["choices"]}
    name = str(field.type)
    if name == "bool":
        return {"action": argparse.BooleanOptionalAction}
    if name.startswith("tuple"):
        # Once per value: nargs="+" would take the model that follows for one value more.
        return {"action": "append", "metavar": "NAME"}
    kinds: dict[str, type] = {"int": int, "float": float, "str": str}
    return {"type": kinds[name.removesuffix(" | None")], "metavar": name[0].upper()}


def _size(text: str) -> int:
    try:
        return parse_size(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from error


def _options(options: type[Any], arguments: argparse.Namespace) -> Any:
    values = {field.name: getattr(arguments, field.name) for field in dataclasses.fields(options)}
    return options(**{name: tuple(v) if isinstance(v, list) else v for name, v in values.items()})
