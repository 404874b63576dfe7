"""Text to token ids and back, from a GGUF file or a folder with tokenizer.json.

Owns: the encoder. Knows: how ids are spelled as bytes, what surrounds a text (BOS, EOS).
Does not know: requests, streams.

Decoding has one definition, `token_bytes`: the text of ids is the UTF-8 of their bytes, each
invalid part replaced by U+FFFD. For byte-level BPE that is Hugging Face's `decode`; for
SentencePiece too as long as the bytes are valid (theirs gives up on a whole run of byte tokens,
which a stream could not know in time).
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import tokenizers

from toque.errors import ModelError, RequestError
from toque.serve.chat_template import ChatTemplate
from toque.serve.gguf_vocab import SPACE, Vocabulary, gguf_vocabulary
from toque.serve.typed import Typed, pattern_of, typed_tokens
from toque.types import Spellings

if TYPE_CHECKING:
    from toque.files.checkpoint import Checkpoint

_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")
_MARKER = re.compile(rb"<[^<>\s]+>|\[[A-Z_/]+\]")  # <tool_call>, [TOOL_CALLS]
_TEMPLATE_TOKENS = ("bos_token", "eos_token", "unk_token", "pad_token")


class Tokenizer:
    """Encodes prompts and decodes answers. Threads may share it: nothing changes after loading."""

    def __init__(self, vocabulary: Vocabulary) -> None:
        self.vocab_size = vocabulary.size
        self.bos_id = vocabulary.bos_id
        self.eos_id = vocabulary.eos_id
        templates, tokens = vocabulary.templates, vocabulary.template_tokens
        self.chat = ChatTemplate(templates, tokens) if templates else None
        self._encoder = vocabulary.encoder
        self._prefix, self._suffix = list(vocabulary.prefix), list(vocabulary.suffix)
        added = vocabulary.encoder.get_added_tokens_decoder()
        self._literal = {i: token.content.encode() for i, token in added.items()}
        self._special = frozenset(i for i, token in added.items() if token.special)
        self._control = {token.content: token for token in added.values() if token.special}
        self._control_ids = {t.content: i for i, t in added.items() if t.special}
        self._control_pattern = pattern_of(self._control)
        self._spell, self._strip_spaces = _spelling(vocabulary.encoder)

    def encode(
        self, text: str, *, add_special_tokens: bool = True, parse_special: bool = True
    ) -> list[int]:
        """The ids of `text`, with BOS (and EOS) where the model wants them and the text has none.

        With parse_special off, text that looks like a control token is only text. Raises
        RequestError if the text is not valid Unicode.
        """
        ids = self._ids(text, parse_special, "prompt")
        if not add_special_tokens:
            return ids
        if ids[: len(self._prefix)] != self._prefix:
            ids = self._prefix + ids
        if self._suffix and ids[-len(self._suffix) :] != self._suffix:
            ids = ids + self._suffix
        return ids

    def encode_chat(
        self,
        messages: list[dict[str, Any]],
        /,
        *,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        tools: list[dict[str, Any]] | None = None,
        **kwargs: Any,
    ) -> list[int]:
        """The ids of the rendered template. It writes BOS itself where the model wants one.

        A control token that is typed inside a message or tool is text; only the template writes
        control. `kwargs` are for the template. Raises RequestError if there is no
        template, or for what the template or `ChatTemplate.render` refuses.
        """
        if self.chat is None:
            raise RequestError(
                "this model has no chat template, which a chat needs; use /v1/completions",
                "messages",
            )
        typed = typed_tokens(messages, self._control_pattern, tools)
        text = self.chat.render(
            messages if typed is None else typed.messages,
            add_generation_prompt=add_generation_prompt,
            continue_final_message=continue_final_message,
            tools=tools if typed is None else typed.tools,
            **kwargs,
        )
        return self._ids(text, True, "messages") if typed is None else self._mixed_ids(text, typed)

    def _mixed_ids(self, text: str, typed: Typed) -> list[int]:
        """The template's control tokens as such, everything between them as text."""
        assert self._control_pattern is not None
        pieces = self._control_pattern.split(text)  # text, token, text, …, text
        for place in range(1, len(pieces), 2):
            token = self._control[pieces[place]]  # some take the blanks beside them
            pieces[place - 1] = pieces[place - 1].rstrip() if token.lstrip else pieces[place - 1]
            pieces[place + 1] = pieces[place + 1].lstrip() if token.rstrip else pieces[place + 1]
        ids: list[int] = []
        for place, piece in enumerate(pieces):
            if place % 2:
                ids.append(self._control_ids[piece])
            elif piece:
                ids += self._ids(typed.restore(piece), False, "messages")
        return ids

    @property
    def template_text(self) -> str:
        return "" if self.chat is None else self.chat.text

    @property
    def template_variables(self) -> frozenset[str]:
        """What the template asks for beside what it sets itself."""
        return frozenset() if self.chat is None else self.chat.variables

    def token_id(self, token: str) -> int | None:
        """The id of a token that the vocabulary spells so; None if it has none."""
        return _id_of(self._encoder, token)

    def decode(
        self,
        ids: Sequence[int],
        *,
        skip_special_tokens: bool = True,
        continuation: bool = False,
    ) -> str:
        """The text of `ids`; as a `continuation`, what they add to a text before them.

        The two differ where encoding puts a space in front (SentencePiece): a whole text loses
        it again, a continuation keeps it, because there it separates words.
        """
        hidden = self._special if skip_special_tokens else frozenset()
        data = b"".join(self.token_bytes(i) for i in ids if i not in hidden)
        text = data.decode("utf-8", errors="replace")
        if continuation:
            return text
        spaces = len(text) - len(text.lstrip(" "))
        return text[min(spaces, self._strip_spaces) :]

    def token_bytes(self, token_id: int) -> bytes:
        """What the token adds to a text; nothing for an id that has no token (padding)."""
        literal = self._literal.get(token_id)
        if literal is not None:
            return literal
        return self._spell(self._piece(token_id))

    def is_special(self, token_id: int) -> bool:
        """Is it a control token, which `skip_special_tokens` hides?"""
        return token_id in self._special

    def spellings(self, end_token_ids: tuple[int, ...]) -> Spellings:
        """How every token is spelled. Markers are control tokens and added ones that look alike:
        text in a grammar never means one."""
        marks = {i for i, text in self._literal.items() if _MARKER.fullmatch(text)}
        return Spellings(
            tokens=tuple(self.token_bytes(i) for i in range(self.vocab_size)),
            markers=tuple(sorted(marks | self._special)),
            end_token_ids=end_token_ids,
            shown=tuple(sorted(marks - self._special)),
        )

    def pieces(self, ids: Iterable[int]) -> list[str]:
        """The tokens as the vocabulary spells them (Hugging Face: convert_ids_to_tokens)."""
        return [self._piece(token_id) for token_id in ids]

    def _piece(self, token_id: int) -> str:
        if not 0 <= token_id < self.vocab_size:
            return ""
        return self._encoder.id_to_token(token_id) or ""

    def _ids(self, text: str, parse_special: bool, param: str) -> list[int]:
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise RequestError(
                f"the text is not valid Unicode: a lone surrogate at character {error.start}", param
            ) from error
        encoder = self._encoder if parse_special else self._plain_encoder
        # A batch of one: `encode` holds the interpreter's lock for the whole text, this does not.
        ids: list[int] = encoder.encode_batch_fast([text], add_special_tokens=False)[0].ids
        return ids

    @cached_property
    def _plain_encoder(self) -> tokenizers.Tokenizer:
        # A second encoder, because the switch is a property of it and other threads are using the
        # first; around the same model, whose vocabulary and merges would take seconds to copy.
        first = self._encoder
        plain = tokenizers.Tokenizer(first.model)
        if first.normalizer is not None:
            plain.normalizer = first.normalizer
        if first.pre_tokenizer is not None:
            plain.pre_tokenizer = first.pre_tokenizer
        for _, token in sorted(first.get_added_tokens_decoder().items()):
            (plain.add_special_tokens if token.special else plain.add_tokens)([token])
        plain.encode_special_tokens = True
        return plain


def load_tokenizer(checkpoint: Checkpoint) -> Tokenizer:
    """The tokenizer that belongs to a checkpoint.

    Raises ModelError, naming the file, if it is missing, damaged or of a kind that is not
    supported.
    """
    if checkpoint.format == "gguf":
        return Tokenizer(gguf_vocabulary(checkpoint.path, checkpoint.metadata))
    return Tokenizer(_folder_vocabulary(checkpoint.path))


# ------------------------------------------------------------------------- a folder's vocabulary


def _folder_vocabulary(folder: Path) -> Vocabulary:
    """Hugging Face's tokenizer.json, with tokenizer_config.json and chat_template.jinja."""
    path = folder / "tokenizer.json"
    if not path.is_file():
        raise ModelError(f"{path}: missing; other tokenizer files are not read, convert them to it")
    try:
        encoder = tokenizers.Tokenizer.from_file(str(path))
    except Exception as error:  # the library raises nothing more specific
        raise ModelError(f"{path}: damaged or not supported: {error}") from error
    encoder.no_truncation()
    encoder.no_padding()
    config = _read_config(folder / "tokenizer_config.json")
    tokens = _template_tokens(config)
    bos_id, eos_id = (_id_of(encoder, tokens.get(f"{role}_token")) for role in ("bos", "eos"))
    # As in transformers, tokenizer_config's add_bos_token says nothing beside a tokenizer.json.
    prefix, suffix = _surroundings(encoder)
    added = encoder.get_added_tokens_decoder()
    return Vocabulary(
        encoder=encoder,
        size=max(encoder.get_vocab_size(), max(added, default=-1) + 1),
        bos_id=bos_id,
        eos_id=eos_id,
        prefix=prefix,
        suffix=suffix,
        templates=_folder_templates(folder, config),
        template_tokens=tokens,
    )


def _read_config(path: Path) -> dict[str, Any]:
    if not path.is_file():
        return {}
    try:
        config = json.loads(path.read_bytes())
    except ValueError as error:
        raise ModelError(f"{path}: not JSON: {error}") from error
    if not isinstance(config, dict):
        raise ModelError(f"{path}: not a JSON object")
    return config


def _template_tokens(config: Mapping[str, Any]) -> dict[str, str]:
    found = {name: config.get(name) for name in _TEMPLATE_TOKENS}
    texts = {k: v.get("content") if isinstance(v, dict) else v for k, v in found.items()}
    return {name: text for name, text in texts.items() if isinstance(text, str)}


def _id_of(encoder: tokenizers.Tokenizer, token: str | None) -> int | None:
    token_id: int | None = None if token is None else encoder.token_to_id(token)
    return token_id


def _surroundings(encoder: tokenizers.Tokenizer) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """The ids that the file's post-processor puts before and after a text."""
    inner = encoder.encode("a", add_special_tokens=False).ids
    outer = encoder.encode("a", add_special_tokens=True).ids
    starts = range(len(outer) - len(inner) + 1)
    start = next(i for i in starts if outer[i : i + len(inner)] == inner)
    return tuple(outer[:start]), tuple(outer[start + len(inner) :])


def _folder_templates(folder: Path, config: Mapping[str, Any]) -> dict[str, str]:
    path = folder / "chat_template.jinja"
    if path.is_file():
        return {"default": path.read_text(encoding="utf-8")}
    found = config.get("chat_template")
    try:
        named = {e["name"]: e["template"] for e in found} if isinstance(found, list) else {}
    except (KeyError, TypeError) as error:
        raise ModelError(f"{folder}: chat_template is not a list of named templates") from error
    return {"default": found} if isinstance(found, str) else named


# ---------------------------------------------------------------------------- tokens as bytes


def _spelling(encoder: tokenizers.Tokenizer) -> tuple[Callable[[str], bytes], int]:
    """How tokens are spelled, and how many spaces decoding takes from the front of a text.

    The decoder tells: ByteLevel, or SentencePiece's Replace, ByteFallback, Fuse and perhaps Strip.
    """
    steps = _decoder_steps(encoder)
    kinds = [step["type"] for step in steps]
    if kinds == ["ByteLevel"]:
        return _byte_level_bytes, 0
    if kinds[:3] == ["Replace", "ByteFallback", "Fuse"] and steps[0] | _REPLACE == steps[0]:
        if kinds[3:] == []:
            return _sentencepiece_bytes, 0
        if kinds[3:] == ["Strip"] and steps[3]["content"] == " " and steps[3]["stop"] == 0:
            return _sentencepiece_bytes, int(steps[3]["start"])
    raise ModelError(
        f"the tokenizer's decoder ({' + '.join(kinds) or 'none'}) is not supported; supported are "
        "ByteLevel and SentencePiece's Replace(▁) + ByteFallback + Fuse (+ Strip of spaces)"
    )


_REPLACE = {"pattern": {"String": SPACE}, "content": " "}


def _decoder_steps(encoder: tokenizers.Tokenizer) -> list[dict[str, Any]]:
    if encoder.decoder is None:
        return []
    state = json.loads(encoder.decoder.__getstate__())
    return state["decoders"] if state["type"] == "Sequence" else [state]


def _byte_alphabet() -> dict[str, int]:
    """GPT-2's: printable Latin-1 bytes are themselves, the others follow from U+0100 on, in order.

    Radford et al., "Language Models are Unsupervised Multitask Learners", 2019.
    """
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {
        chr(0x100 + place): byte for place, byte in enumerate(others)
    }


_BYTE_OF = _byte_alphabet()


def _byte_level_bytes(piece: str) -> bytes:
    try:
        return bytes([_BYTE_OF[char] for char in piece])
    except KeyError:  # not in the alphabet: such a token is taken as it stands, as in `decode`
        return piece.encode()


def _sentencepiece_bytes(piece: str) -> bytes:
    byte = _BYTE_TOKEN.fullmatch(piece)
    if byte is not None:
        return bytes([int(byte.group(1), 16)])
    return piece.replace(SPACE, " ").encode()
