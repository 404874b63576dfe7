"""The vocabulary that a GGUF file carries, as an encoder of the `tokenizers` library.

Keys: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md, section "Tokenizer". A file holds
tokens, their types, and merges or scores; of the rest (normalizer, splitting, decoder) it holds
only a name. What a name means is taken from the published tokenizer.json of the model behind it,
so that ids are those of Hugging Face: SmolLM2, Qwen2, Llama 3 and GPT-2 for byte-level BPE, Llama 2
and Mistral for SentencePiece. A name that is not in the table is refused: a guess would give wrong
ids without a word.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from operator import methodcaller
from pathlib import Path
from typing import Any

import tokenizers
from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers

from toque.errors import ModelError

NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = 1, 2, 3, 4, 5, 6  # tokenizer.ggml.token_type
SPACE = "▁"  # how SentencePiece writes a space
_WORDS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+"
_OTHERS = r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"


@dataclass(frozen=True, slots=True)
class Vocabulary:
    """What a model's files say about text, whichever format they have."""

    encoder: tokenizers.Tokenizer  # adds no BOS or EOS of its own: `prefix` and `suffix` do
    size: int  # ids are below this
    bos_id: int | None
    eos_id: int | None
    prefix: tuple[int, ...]  # before every text, if not there already
    suffix: tuple[int, ...]
    templates: Mapping[str, str]  # chat templates by name; "default" is the usual one
    template_tokens: Mapping[str, str]  # bos_token, eos_token, … for the templates


@dataclass(frozen=True, slots=True)
class _Splitting:
    """What `tokenizer.ggml.pre` stands for: how text is cut before merging."""

    pattern: str | None = None  # None: GPT-2's own
    digits: bool = False  # every digit alone, ahead of GPT-2's pattern
    nfc: bool = False
    ignore_merges: bool = False  # a piece that is a token is taken whole
    add_bos: bool = False  # where the file does not say


_LLAMA3 = _Splitting(rf"{_WORDS}|\p{{N}}{{1,3}}|{_OTHERS}", ignore_merges=True, add_bos=True)
SPLITTINGS = {
    "gpt-2": _Splitting(),
    "smollm": _Splitting(digits=True),
    "qwen2": _Splitting(rf"{_WORDS}|\p{{N}}|{_OTHERS}", nfc=True),
    "llama-bpe": _LLAMA3,
    "llama-v3": _LLAMA3,
    "llama3": _LLAMA3,
}


def gguf_vocabulary(path: Path, metadata: Mapping[str, Any]) -> Vocabulary:
    """Build the vocabulary of a GGUF file from its key-values.

    Raises ModelError, naming file and key, for what is missing, contradictory or not supported.
    """
    keys = _Keys(path, metadata)
    kind = keys.require("model", str)
    if kind == "gpt2":
        splitting = keys.splitting()
        encoder, add_bos = _byte_level(keys, splitting), splitting.add_bos
    elif kind == "llama":
        encoder, add_bos = _sentencepiece(keys), True
    else:
        raise keys.error("model", f"is {kind!r}; supported are 'gpt2' and 'llama'")
    _add_special(encoder, keys)
    bos_id, eos_id = keys.token_id("bos"), keys.token_id("eos")
    names = {"bos": bos_id, "eos": eos_id}
    return Vocabulary(
        encoder=encoder,
        size=len(keys.tokens),
        bos_id=bos_id,
        eos_id=eos_id,
        prefix=keys.added("bos", bos_id, add_bos),
        suffix=keys.added("eos", eos_id, False),
        templates=_templates(path, metadata),
        template_tokens={f"{k}_token": keys.tokens[v] for k, v in names.items() if v is not None},
    )


class _Keys:
    """The `tokenizer.ggml.*` values of one file, checked as they are read."""

    def __init__(self, path: Path, metadata: Mapping[str, Any]) -> None:
        self.path = path
        self.metadata = metadata
        self.tokens: list[str] = self.array("tokens")  # by id
        self.types: list[int] = self.array("token_type", len(self.tokens))
        # Unused entries pad the embedding matrix: as part of the vocabulary they could be matched.
        kinds = zip(self.tokens, range(len(self.tokens)), self.types, strict=True)
        self.vocab = {token: i for token, i, kind in kinds if kind != UNUSED}
        if len(self.vocab) + self.types.count(UNUSED) != len(self.tokens):
            raise self.error("tokens", "holds the same token twice")

    def error(self, name: str, message: str) -> ModelError:
        return ModelError(f"{self.path}: tokenizer.ggml.{name} {message}")

    def get(self, name: str) -> Any:
        return self.metadata.get(f"tokenizer.ggml.{name}")

    def require(self, name: str, kind: type) -> Any:
        value = self.get(name)
        if value is None:
            raise self.error(name, "is missing: this file does not say how to tokenize")
        if not isinstance(value, kind):
            raise self.error(name, f"is {value!r}, not a {kind.__name__}")
        return value

    def array(self, name: str, length: int | None = None) -> list[Any]:
        values = self.require(name, object)
        if not hasattr(values, "__len__"):
            raise self.error(name, f"is {values!r}, not an array")
        if length is not None and len(values) != length:
            raise self.error(name, f"has {len(values)} entries for {length} tokens")
        return list(values.tolist() if hasattr(values, "tolist") else values)

    def flag(self, name: str, default: bool) -> bool:
        return default if self.get(name) is None else bool(self.require(name, bool))

    def token_id(self, role: str) -> int | None:
        name = f"{role}_token_id"
        if self.get(name) is None:
            return None
        value = int(self.require(name, int))
        if not 0 <= value < len(self.tokens):
            raise self.error(name, f"is {value}, but there are {len(self.tokens)} tokens")
        return value

    def added(self, role: str, token_id: int | None, default: bool) -> tuple[int, ...]:
        """The ids that `add_bos_token` or `add_eos_token` puts around every text."""
        name = f"add_{role}_token"
        if not self.flag(name, default):
            return ()
        if token_id is None:
            raise self.error(name, f"is set, but {role}_token_id is missing")
        return (token_id,)

    def splitting(self) -> _Splitting:
        name = self.require("pre", str)
        if name not in SPLITTINGS:
            raise self.error("pre", f"is {name!r}; supported are {', '.join(sorted(SPLITTINGS))}")
        if self.flag("add_space_prefix", False):
            raise self.error("add_space_prefix", "is true, which byte-level BPE does not support")
        return SPLITTINGS[name]

    def merges(self) -> list[tuple[str, str]]:
        pairs = list(map(tuple, map(methodcaller("split", " ", 1), self.array("merges"))))
        if set(map(len, pairs)) - {2}:
            wrong = next(pair for pair in pairs if len(pair) != 2)
            raise self.error("merges", f"has an entry that is not a pair: {wrong[0]!r}")
        return pairs

    def of_type(self, *types: int) -> list[str]:
        return [self.tokens[i] for i, kind in enumerate(self.types) if kind in types]


def _byte_level(keys: _Keys, splitting: _Splitting) -> tokenizers.Tokenizer:
    encoder = _bpe(keys, keys.merges(), ignore_merges=splitting.ignore_merges)
    if splitting.nfc:
        encoder.normalizer = normalizers.NFC()
    steps: list[pre_tokenizers.PreTokenizer] = []
    if splitting.digits:
        steps.append(pre_tokenizers.Digits(individual_digits=True))
    if splitting.pattern is not None:
        steps.append(pre_tokenizers.Split(Regex(splitting.pattern), behavior="isolated"))
    use_regex = splitting.pattern is None
    steps.append(pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=use_regex))
    encoder.pre_tokenizer = pre_tokenizers.Sequence(steps)
    encoder.decoder = decoders.ByteLevel()
    return encoder


def _sentencepiece(keys: _Keys) -> tokenizers.Tokenizer:
    """SentencePiece's BPE: no splitting, spaces as ▁, bytes where no token fits.

    The space that is put in front comes from a normalizer, hence also after each control token, as
    in Llama 2's and Mistral's tokenizer.json.
    """
    if keys.flag("remove_extra_whitespaces", False):
        raise keys.error("remove_extra_whitespaces", "is true, which is not supported")
    if keys.get("precompiled_charsmap") is not None:
        raise keys.error("precompiled_charsmap", "is present, but not supported")
    unknown = keys.token_id("unknown")
    if unknown is None and len(keys.of_type(BYTE)) < 256:
        raise keys.error("unknown_token_id", "is missing, and there is no token for every byte")
    merges = _merges_by_score(keys) if keys.get("merges") is None else keys.merges()
    encoder = _bpe(
        keys,
        merges,
        byte_fallback=True,
        fuse_unk=True,
        unk_token=None if unknown is None else keys.tokens[unknown],
    )
    spaces: normalizers.Normalizer = normalizers.Replace(" ", SPACE)
    steps: list[decoders.Decoder] = [decoders.Replace(SPACE, " ")]
    steps += [decoders.ByteFallback(), decoders.Fuse()]
    if keys.flag("add_space_prefix", True):
        spaces = normalizers.Sequence([normalizers.Prepend(SPACE), spaces])
        steps.append(decoders.Strip(content=" ", left=1, right=0))
    encoder.normalizer = spaces
    encoder.decoder = decoders.Sequence(steps)
    return encoder


def _merges_by_score(keys: _Keys) -> list[tuple[str, str]]:
    """Every way to make a token of two others, best score first.

    SentencePiece joins whichever two neighbours give the best-scored token. Only normal tokens are
    made that way: never a control token, and a byte's name is not text.
    """
    scores = keys.array("scores", len(keys.tokens))
    normal = {t: i for t, i in keys.vocab.items() if keys.types[i] == NORMAL}
    ranked = sorted(normal, key=lambda token: -scores[normal[token]])
    return [(token[:cut], token[cut:]) for token in ranked for cut in _cuts(token, normal)]


def _cuts(token: str, normal: Mapping[str, int]) -> Sequence[int]:
    cuts = [c for c in range(1, len(token)) if token[:c] in normal and token[c:] in normal]
    # One score for all of them; Hugging Face's converter lists the longer left part first.
    return cuts[::-1]


def _bpe(keys: _Keys, merges: list[tuple[str, str]], **options: Any) -> tokenizers.Tokenizer:
    try:
        return tokenizers.Tokenizer(models.BPE(vocab=keys.vocab, merges=merges, **options))
    except Exception as error:  # the library raises nothing more specific
        raise keys.error("merges", f"do not fit the tokens: {error}") from error


def _add_special(encoder: tokenizers.Tokenizer, keys: _Keys) -> None:
    """Tokens that are matched whole: control ones, which decoding may hide, and the user's."""
    for types, special in (((CONTROL, UNKNOWN), True), ((USER_DEFINED,), False)):
        encoder.add_tokens(
            [AddedToken(t, normalized=False, special=special) for t in keys.of_type(*types)]
        )


def _templates(path: Path, metadata: Mapping[str, Any]) -> dict[str, str]:
    key = "tokenizer.chat_template"
    found = {k[len(key) + 1 :]: v for k, v in metadata.items() if k.startswith(f"{key}.")}
    if key in metadata:
        found["default"] = metadata[key]
    for name, template in found.items():
        if not isinstance(template, str):
            raise ModelError(f"{path}: the chat template {name!r} is not a string")
    return found
