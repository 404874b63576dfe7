"""Token ids and texts equal Hugging Face's (and SentencePiece's), for every kind of vocabulary.

Oracles. Byte-level BPE: the `tokenizers` library, put together from the pieces of the published
tokenizer.json. `transformers` converts GGUF vocabularies too, but not rightly: it leaves out
SmolLM2's splitting of digits and Qwen2's NFC. SentencePiece: the `sentencepiece` library itself.
"""

from __future__ import annotations

import io
import json
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import gguf
import pytest
import sentencepiece
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import (
    AddedToken,
    Regex,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    processors,
    trainers,
)
from transformers import AutoTokenizer, LlamaTokenizer

from toque.errors import ModelError, RequestError
from toque.files.checkpoint import open_checkpoint
from toque.serve.gguf_vocab import gguf_vocabulary
from toque.serve.stream import TextStream
from toque.serve.tokenizer import Tokenizer, load_tokenizer

CORPUS = [
    "",
    " ",
    "a",
    "  lead and trail  ",
    "\n\n\n",
    "\t\tx\n  y\r\n\r\n \t \n",
    "Hello, world! It's 2024; don't WE'LL THEY'RE 'ſ",
    "1234567890 3.14159 1,000,000\n 4 ½ ² Ⅷ ٣٤٥ 一二三",
    "naïve café Ångström ﬁ Å e\u0301 a\u0308\u0323 \u1e9b\u0323 İı ß ẞ",
    "日本語のテキスト。中文字符，测试 한국어 텍스트 각",
    "مرحبا بالعالم كيف حالك؟ שלום עולם हिन्दी में पाठ ไทยภาษา",
    "👩‍👩‍👧‍👦 🧑🏽‍🚀 🇩🇪🇫🇷 ❤️ 🏴‍☠️",
    "def f(x):\n    return x**2  # sq\n\tif x != None: pass\n",
    "for(int i=0;i<10;++i){a[i]<<=2;} // https://example.com/a?b=c&d=%20",
    "\u00a0nbsp\u2003em\u3000ideo\u200bzw\ufeffbom\u2028\u2029\x85\x0b\x0c",
    "....!!!???---===" + "x" * 100 + "ab " * 50,
    "\U0010ffff\ufffd\ud7ff\ue000",
]
WITH_SPECIAL = [
    "<|im_start|>user\nhi<|im_end|>\n",
    "<|endoftext|>",
    "a <|im_end|> b<|im_end|><|im_end|>",
    "<tool_call>{}</tool_call> <|not_special|> <|im_start",
]
CONTROL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
USERS = ["<tool_call>", "</tool_call>"]
WORDS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+"
OTHERS = r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
TEMPLATE = "{{ bos_token }}{% for m in messages %}{{ m.content }}{{ eos_token }}{% endfor %}"
texts = st.text(st.one_of(st.characters(codec="utf-8"), st.sampled_from(" \n\r'1a\u0301é")))


def split_by(pattern: str) -> pre_tokenizers.PreTokenizer:
    return pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(pattern), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )


# The published tokenizer.json of each: SmolLM2, Qwen2.5, Llama 3, GPT-2.
PRE_TOKENIZERS: dict[str, pre_tokenizers.PreTokenizer] = {
    "smollm": pre_tokenizers.Sequence(
        [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False),
        ]
    ),
    "qwen2": split_by(rf"{WORDS}|\p{{N}}|{OTHERS}"),
    "llama-bpe": split_by(rf"{WORDS}|\p{{N}}{{1,3}}|{OTHERS}"),
    "gpt-2": pre_tokenizers.ByteLevel(add_prefix_space=False),
}


def train(pre: str) -> tokenizers.Tokenizer:
    original = tokenizers.Tokenizer(models.BPE(ignore_merges=pre == "llama-bpe"))
    original.pre_tokenizer = PRE_TOKENIZERS[pre]
    original.decoder = decoders.ByteLevel()
    if pre == "qwen2":
        original.normalizer = normalizers.NFC()
    trainer = trainers.BpeTrainer(
        vocab_size=600,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    original.train_from_iterator(CORPUS * 2, trainer)
    original.add_special_tokens([AddedToken(t, normalized=False) for t in CONTROL])
    original.add_tokens([AddedToken(t, normalized=False) for t in USERS])
    return original


def byte_level_keys(original: tokenizers.Tokenizer, pre: str, padding: int = 3) -> dict[str, Any]:
    by_id = sorted(original.get_vocab().items(), key=lambda entry: entry[1])
    tokens = [token for token, _ in by_id]
    merges = json.loads(original.to_str())["model"]["merges"]
    kinds = dict.fromkeys(CONTROL, 3) | dict.fromkeys(USERS, 4)
    return {
        "model": "gpt2",
        "pre": pre,
        "tokens": [*tokens, *(f"[PAD{len(tokens) + i}]" for i in range(padding))],
        "token_type": [kinds.get(token, 1) for token in tokens] + [5] * padding,
        "merges": [" ".join(pair) for pair in merges],
        "bos_token_id": tokens.index("<|endoftext|>"),
        "eos_token_id": tokens.index("<|im_end|>"),
        "add_bos_token": False,
    }


def write_gguf(path: Path, keys: Mapping[str, Any], template: str = TEMPLATE) -> Path:
    writer = gguf.GGUFWriter(path, "llama")
    for name, value in keys.items():
        add: Callable[[str, Any], None] = {
            bool: writer.add_bool,
            int: writer.add_uint32,
            str: writer.add_string,
            list: writer.add_array,
        }[type(value)]
        add(f"tokenizer.ggml.{name}", value)
    writer.add_string("tokenizer.chat_template", template)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def from_keys(keys: Mapping[str, Any]) -> Tokenizer:
    metadata = {f"tokenizer.ggml.{name}": value for name, value in keys.items()}
    return Tokenizer(gguf_vocabulary(Path("model.gguf"), metadata))


def ids_of(original: tokenizers.Tokenizer, text: str) -> list[int]:
    ids: list[int] = original.encode(text, add_special_tokens=False).ids
    return ids


@dataclass(frozen=True)
class Pair:
    ours: Tokenizer
    original: tokenizers.Tokenizer
    keys: dict[str, Any]


@pytest.fixture(scope="module", params=list(PRE_TOKENIZERS))
def pair(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Pair:
    """A small vocabulary, trained here, and what comes back from a GGUF file of it."""
    original = train(request.param)
    keys = byte_level_keys(original, request.param)
    path = write_gguf(tmp_path_factory.mktemp("gguf") / "model.gguf", keys)
    return Pair(load_tokenizer(open_checkpoint(path)), original, keys)


class TestByteLevelGguf:
    @pytest.mark.parametrize("text", CORPUS + WITH_SPECIAL)
    def test_ids_equal_the_original_s(self, pair: Pair, text: str) -> None:
        assert pair.ours.encode(text) == ids_of(pair.original, text)

    def test_ids_equal_the_original_s_for_any_text(self, pair: Pair) -> None:
        @settings(deadline=None)
        @given(text=texts)
        def check(text: str) -> None:
            assert pair.ours.encode(text) == ids_of(pair.original, text)

        check()

    @pytest.mark.parametrize("skip", [True, False])
    def test_any_ids_decode_as_the_original_does_whole_or_streamed(
        self, pair: Pair, skip: bool
    ) -> None:
        @settings(deadline=None)
        @given(ids=st.lists(st.integers(0, pair.original.get_vocab_size() - 1)))
        def check(ids: list[int]) -> None:
            expected = pair.original.decode(ids, skip_special_tokens=skip)
            assert pair.ours.decode(ids, skip_special_tokens=skip) == expected
            stream = TextStream(pair.ours, skip_special_tokens=skip)
            assert "".join([*map(stream.push, ids), stream.flush()]) == expected

        check()

    def test_control_tokens_can_be_read_as_text(self, pair: Pair) -> None:
        """The switch changes control tokens only; the user's tokens stay whole, as in HF."""
        plain = tokenizers.Tokenizer.from_str(pair.original.to_str())
        plain.encode_special_tokens = True
        for text in CORPUS + WITH_SPECIAL:
            ids = pair.ours.encode(text, parse_special=False)
            assert ids == ids_of(plain, text)
            assert not any(map(pair.ours.is_special, ids))
        assert pair.ours.encode("<|im_end|>") == [pair.ours.eos_id]

    def test_each_token_knows_its_bytes(self, pair: Pair) -> None:
        for text in CORPUS:
            ids = pair.ours.encode(text)
            normal = (
                pair.original.normalizer.normalize_str(text) if pair.original.normalizer else text
            )
            assert b"".join(map(pair.ours.token_bytes, ids)) == normal.encode()
        for token in CONTROL + USERS:
            token_id = pair.original.token_to_id(token)
            assert pair.ours.token_bytes(token_id) == token.encode()
            assert pair.ours.is_special(token_id) == (token in CONTROL)

    def test_pieces_are_spelled_as_the_vocabulary_spells_them(self, pair: Pair) -> None:
        encoding = pair.original.encode("Hello wörld<|im_end|>", add_special_tokens=False)
        assert pair.ours.pieces(encoding.ids) == encoding.tokens

    def test_padding_of_the_vocabulary_has_no_text(self, pair: Pair) -> None:
        size = pair.original.get_vocab_size()
        assert pair.ours.vocab_size == size + 3
        assert pair.ours.decode([size, size + 2, size + 3, 10**12]) == ""
        assert pair.ours.encode(f"[PAD{size}]") == ids_of(pair.original, f"[PAD{size}]")


def test_llama3_takes_a_piece_that_is_a_token_whole() -> None:
    """Llama 3 ignores merges there; the others can only reach a token by merging."""
    original = train("llama-bpe")
    keys = byte_level_keys(original, "llama-bpe", padding=0)
    keys["tokens"], keys["token_type"] = [*keys["tokens"], "qzj"], [*keys["token_type"], 1]
    assert from_keys(keys).pieces(from_keys(keys).encode("qzj", add_special_tokens=False)) == [
        "qzj"
    ]
    assert len(from_keys(keys | {"pre": "gpt-2"}).encode("qzj")) == 3


@pytest.fixture(scope="module")
def smollm2(smollm2_path: Path) -> Pair:
    fields = gguf.GGUFReader(smollm2_path).fields
    names = ("tokens", "token_type", "merges")
    keys = {name: fields[f"tokenizer.ggml.{name}"].contents() for name in names}
    vocab = {token: token_id for token_id, token in enumerate(keys["tokens"])}
    merges = [tuple(merge.split(" ")) for merge in keys["merges"]]
    original = tokenizers.Tokenizer(models.BPE(vocab=vocab, merges=merges))
    original.pre_tokenizer = PRE_TOKENIZERS["smollm"]
    original.decoder = decoders.ByteLevel()
    control = [t for t, kind in zip(vocab, keys["token_type"], strict=True) if kind == 3]
    original.add_special_tokens([AddedToken(t, normalized=False) for t in control])
    return Pair(load_tokenizer(open_checkpoint(smollm2_path)), original, keys)


class TestRealFile:
    """SmolLM2-135M-Instruct, the default model."""

    @pytest.mark.parametrize("text", CORPUS + WITH_SPECIAL)
    def test_ids_and_text_equal_the_published_tokenizer_s(self, smollm2: Pair, text: str) -> None:
        ids = smollm2.ours.encode(text)
        assert ids == ids_of(smollm2.original, text)
        assert smollm2.ours.decode(ids) == smollm2.original.decode(ids)

    def test_known_ids(self, smollm2: Pair) -> None:
        """The prompt that the published chat template and tokenizer make of one word."""
        chat = smollm2.ours.encode_chat([{"role": "user", "content": "hi"}])
        assert chat[:3] == [1, 9690, 198]
        assert chat[-8:] == [198, 6004, 2, 198, 1, 520, 9531, 198]
        assert (smollm2.ours.vocab_size, smollm2.ours.bos_id, smollm2.ours.eos_id) == (49152, 1, 2)

    @pytest.mark.long
    def test_transformers_agrees_where_no_digit_follows_white_space(
        self, smollm2: Pair, smollm2_path: Path
    ) -> None:
        theirs = AutoTokenizer.from_pretrained(smollm2_path.parent, gguf_file=smollm2_path.name)
        for text in CORPUS + WITH_SPECIAL:
            if "\n 4" not in text:
                assert smollm2.ours.encode(text) == theirs.encode(text)
        messages = [{"role": "user", "content": "hé 🚀"}, {"role": "assistant", "content": "yo"}]
        expected = theirs.apply_chat_template(messages, return_dict=False)
        assert smollm2.ours.encode_chat(messages, add_generation_prompt=False) == expected


# ----------------------------------------------------------------------------------------- BOS


class TestBos:
    def keys(self, **more: object) -> dict[str, Any]:
        return byte_level_keys(train("llama-bpe"), "llama-bpe") | more

    def test_is_added_where_the_file_says_so_and_never_twice(self) -> None:
        ours = from_keys(self.keys(add_bos_token=True))
        bos, plain = ours.bos_id, ours.encode("hi", add_special_tokens=False)
        assert ours.encode("hi") == [bos, *plain]
        assert ours.encode("<|endoftext|>hi") == [bos, *plain]
        assert ours.encode("") == [bos]
        assert bos not in from_keys(self.keys(add_bos_token=False)).encode("hi")

    def test_llama3_has_one_where_the_file_says_nothing(self) -> None:
        keys = self.keys()
        del keys["add_bos_token"]
        assert from_keys(keys).encode("hi")[0] == keys["bos_token_id"]
        assert from_keys(keys | {"pre": "qwen2"}).encode("hi")[0] != keys["bos_token_id"]

    def test_a_chat_has_those_that_its_template_writes(self, tmp_path: Path) -> None:
        messages = [{"role": "user", "content": "hi"}]
        path = write_gguf(tmp_path / "with.gguf", self.keys(add_bos_token=True))
        ours = load_tokenizer(open_checkpoint(path))
        hi = ours.encode("hi", add_special_tokens=False)
        assert ours.encode_chat(messages) == [ours.bos_id, *hi, ours.eos_id]
        path = write_gguf(tmp_path / "without.gguf", self.keys(), "{{ messages[0].content }}")
        assert load_tokenizer(open_checkpoint(path)).encode_chat(messages) == hi

    def test_end_tokens_are_added_where_the_file_says_so(self) -> None:
        ours = from_keys(self.keys(add_eos_token=True))
        assert ours.encode("hi")[-1] == ours.eos_id
        assert ours.encode("hi<|im_end|>").count(ours.eos_id) == 1


# ------------------------------------------------------------------------------- SentencePiece


def train_sentencepiece(**options: Any) -> sentencepiece.SentencePieceProcessor:
    model = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter([text for text in CORPUS if text.strip()] * 3),
        model_writer=model,
        model_type="bpe",
        vocab_size=600,
        byte_fallback=True,
        character_coverage=0.98,
        normalization_rule_name="identity",
        remove_extra_whitespaces=False,
        allow_whitespace_only_pieces=True,
        split_digits=True,
        minloglevel=3,
        num_threads=1,
        **options,
    )
    return sentencepiece.SentencePieceProcessor(model_proto=model.getvalue())


def sentencepiece_keys(original: sentencepiece.SentencePieceProcessor) -> dict[str, Any]:
    ids = range(original.get_piece_size())
    kinds = {2: original.is_unknown, 3: original.is_control, 6: original.is_byte}
    return {
        "model": "llama",
        "tokens": [original.id_to_piece(i) for i in ids],
        "scores": [original.get_score(i) for i in ids],
        "token_type": [next((k for k, test in kinds.items() if test(i)), 1) for i in ids],
        "bos_token_id": 1,
        "eos_token_id": 2,
        "unknown_token_id": 0,
    }


@pytest.fixture(scope="module")
def original() -> sentencepiece.SentencePieceProcessor:
    return train_sentencepiece()


@pytest.fixture(scope="module")
def ours(
    original: sentencepiece.SentencePieceProcessor, tmp_path_factory: pytest.TempPathFactory
) -> Tokenizer:
    path = tmp_path_factory.mktemp("spm") / "model.gguf"
    return load_tokenizer(open_checkpoint(write_gguf(path, sentencepiece_keys(original))))


class TestSentencePieceGguf:
    def test_ids_and_text_equal_the_library_s(
        self, original: sentencepiece.SentencePieceProcessor, ours: Tokenizer
    ) -> None:
        fragments = st.sampled_from(["a", " ", "  ", "é", "日本", "\n", "x", "ab", "👩", "1"])

        @given(text=st.one_of(st.sampled_from(CORPUS), texts, st.lists(fragments).map("".join)))
        @settings(max_examples=300, deadline=None)
        def check(text: str) -> None:
            text = text.replace("\0", "")  # SentencePiece drops it
            ids = original.encode(text)
            assert ours.encode(text, add_special_tokens=False) == ids
            assert ours.decode(ids) == original.decode(ids) == text.replace("▁", " ")

        check()

    def test_bos_comes_first_and_once_and_the_space_after_it(self, ours: Tokenizer) -> None:
        assert ours.pieces(ours.encode("hi"))[:2] == ["<s>", "▁"]
        assert ours.encode("<s>hi") == ours.encode("hi")

    def test_names_of_control_and_byte_tokens_can_be_text(
        self, original: sentencepiece.SentencePieceProcessor, ours: Tokenizer
    ) -> None:
        for text in ("<s>hi</s>", "<0x41> <unk>"):
            ids = ours.encode(text, add_special_tokens=False, parse_special=False)
            assert ids == original.encode(text)

    def test_text_is_never_merged_into_a_control_token(
        self, original: sentencepiece.SentencePieceProcessor
    ) -> None:
        """Also where the vocabulary has all but the last letter of one."""
        keys = sentencepiece_keys(original)
        keys["tokens"] = [*keys["tokens"], "<s", ">"]
        keys["scores"] = [*keys["scores"], -1e6, -1e6]
        keys["token_type"] = [*keys["token_type"], 1, 1]
        ours = from_keys(keys)
        ids = ours.encode("1<s>", add_special_tokens=False, parse_special=False)
        assert ours.pieces(ids)[-2:] == ["<s", ">"]

    def test_the_first_space_goes_from_a_text_but_stays_in_a_continuation(
        self, ours: Tokenizer
    ) -> None:
        ids = ours.encode("  two", add_special_tokens=False)
        assert ours.decode(ids) == "  two"
        assert ours.decode(ids, continuation=True) == "   two"
        stream = TextStream(ours)
        assert "".join([*map(stream.push, ids), stream.flush()]) == "   two"

    def test_any_ids_stream_as_they_decode(self, ours: Tokenizer) -> None:
        @settings(deadline=None)
        @given(ids=st.lists(st.integers(0, ours.vocab_size - 1)))
        def check(ids: list[int]) -> None:
            stream = TextStream(ours)
            streamed = "".join([*map(stream.push, ids), stream.flush()])
            assert streamed == ours.decode(ids, continuation=True)

        check()

    def test_bytes_that_make_a_character_across_tokens(self, ours: Tokenizer) -> None:
        ids = ours.encode("🫠", add_special_tokens=False)
        assert ours.pieces(ids)[-4:] == ["<0xF0>", "<0x9F>", "<0xAB>", "<0xA0>"]
        assert b"".join(map(ours.token_bytes, ids)) == " 🫠".encode()

    def test_without_a_space_in_front(self) -> None:
        original = train_sentencepiece(add_dummy_prefix=False)
        ours = from_keys(sentencepiece_keys(original) | {"add_space_prefix": False})
        for text in CORPUS:
            ids = ours.encode(text, add_special_tokens=False)
            assert ids == original.encode(text)
            assert ours.decode(ids) == text


# -------------------------------------------------------------------------------------- folder


def write_folder(folder: Path, original: tokenizers.Tokenizer, **config: Any) -> Tokenizer:
    original.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    (folder / "config.json").write_text(json.dumps({"model_type": "llama"}))
    return load_tokenizer(open_checkpoint(folder, "dummy"))


def with_bos(original: tokenizers.Tokenizer) -> tokenizers.Tokenizer:
    bos = ("<|endoftext|>", original.token_to_id("<|endoftext|>"))
    original.post_processor = processors.TemplateProcessing(
        single=f"{bos[0]} $A", special_tokens=[bos]
    )
    return original


class TestFolder:
    TOKENS: Mapping[str, Any] = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": {"content": "<|endoftext|>", "__type": "AddedToken"},
        "eos_token": "<|im_end|>",
    }

    @pytest.mark.parametrize(
        "flags",
        [{}, {"add_bos_token": True}, {"add_bos_token": False}, {"add_eos_token": True}],
        ids=str,
    )
    @pytest.mark.parametrize("pre", ["qwen2", "llama-bpe"])
    def test_ids_and_text_equal_hugging_face_s(
        self, tmp_path: Path, pre: str, flags: dict[str, bool]
    ) -> None:
        original = with_bos(train(pre)) if pre == "llama-bpe" else train(pre)
        original.enable_truncation(4)  # of the model's training: not for prompts
        ours = write_folder(tmp_path, original, chat_template=TEMPLATE, **self.TOKENS, **flags)
        theirs = AutoTokenizer.from_pretrained(tmp_path)
        for text in CORPUS + WITH_SPECIAL[2:]:
            ids = theirs.encode(text, truncation=False)
            assert ours.encode(text) == ids
            assert ours.decode(ids) == theirs.decode(ids, skip_special_tokens=True)
        messages = [{"role": "user", "content": "hi"}]
        assert ours.encode_chat(messages) == theirs.apply_chat_template(
            messages, add_generation_prompt=True, return_dict=False
        )
        assert (ours.bos_id, ours.eos_id) == (theirs.bos_token_id, theirs.eos_token_id)
        assert ours.vocab_size == len(theirs)

    def test_bos_is_not_doubled(self, tmp_path: Path) -> None:
        ours = write_folder(tmp_path, with_bos(train("llama-bpe")), **self.TOKENS)
        assert ours.encode("<|endoftext|>hi") == ours.encode("hi")
        assert ours.encode("hi").count(ours.bos_id or -1) == 1

    def test_sentencepiece_in_tokenizer_json(self, tmp_path: Path) -> None:
        keys = sentencepiece_keys(train_sentencepiece())
        vocab = {token: token_id for token_id, token in enumerate(keys["tokens"])}
        merges = [
            (token[:cut], token[cut:])
            for token, kind in zip(vocab, keys["token_type"], strict=True)
            for cut in range(1, len(token))
            if kind == 1 and token[:cut] in vocab and token[cut:] in vocab
        ]
        theirs = LlamaTokenizer(vocab=vocab, merges=merges)
        ours = write_folder(tmp_path, theirs.backend_tokenizer, bos_token="<s>", eos_token="</s>")
        for text in CORPUS:
            ids = theirs.encode(text)
            assert ours.encode(text) == ids
            assert ours.decode(ids) == theirs.decode(ids, skip_special_tokens=True)

    def test_templates_come_from_either_file_or_by_name(self, tmp_path: Path) -> None:
        original = train("gpt-2")
        named = [{"name": "default", "template": "D"}, {"name": "tool_use", "template": "T"}]
        ours = write_folder(tmp_path, original, chat_template=named)
        assert ours.encode_chat([]) == ours.encode("D")
        assert ours.encode_chat([], tools=[{}]) == ours.encode("T")
        (tmp_path / "chat_template.jinja").write_text("J", encoding="utf-8")
        ours = write_folder(tmp_path, original, chat_template=named)
        assert ours.encode_chat([]) == ours.encode("J")


# ------------------------------------------------------------------------------------ refusals


def without(name: str) -> Callable[[dict[str, Any]], object]:
    return lambda keys: keys.pop(name)


def setting(**values: object) -> Callable[[dict[str, Any]], object]:
    return lambda keys: keys.update(values)


@pytest.mark.parametrize(
    ("damage", "says"),
    [
        (setting(model="bert"), "model is 'bert'; supported are 'gpt2' and 'llama'"),
        (setting(pre="tekken"), "pre is 'tekken'; supported are gpt-2, llama-bpe"),
        (without("pre"), "pre is missing"),
        (without("tokens"), "tokens is missing"),
        (without("merges"), "merges is missing"),
        (without("token_type"), "token_type is missing"),
        (setting(token_type=[1]), "token_type has 1 entries for"),
        (setting(merges=["ab"]), "not a pair: 'ab'"),
        (setting(merges=["q absent"]), "merges do not fit the tokens"),
        (setting(bos_token_id=10**6), "bos_token_id is 1000000, but there are"),
        (setting(bos_token_id="1"), "bos_token_id is '1', not a int"),
        (setting(add_bos_token="yes"), "add_bos_token is 'yes', not a bool"),
        (setting(add_space_prefix=True), "add_space_prefix is true"),
        (lambda keys: (keys.pop("bos_token_id"), keys.update(add_bos_token=True)), "is missing"),
        (lambda keys: keys["tokens"].__setitem__(0, keys["tokens"][1]), "same token twice"),
    ],
)
def test_a_gguf_vocabulary_that_cannot_be_right_is_refused(
    damage: Callable[[dict[str, Any]], object], says: str
) -> None:
    keys = byte_level_keys(train("gpt-2"), "gpt-2")
    damage(keys)
    with pytest.raises(ModelError, match=says) as caught:
        from_keys(keys)
    assert "model.gguf: tokenizer.ggml." in str(caught.value)


@pytest.mark.parametrize(
    ("damage", "says"),
    [
        (without("scores"), "scores is missing"),
        (setting(precompiled_charsmap=[1]), "precompiled_charsmap"),
        (setting(remove_extra_whitespaces=True), "remove_extra_whitespaces"),
    ],
)
def test_a_sentencepiece_vocabulary_that_cannot_be_right_is_refused(
    damage: Callable[[dict[str, Any]], object], says: str
) -> None:
    keys = sentencepiece_keys(train_sentencepiece())
    damage(keys)
    with pytest.raises(ModelError, match=says):
        from_keys(keys)


def test_a_folder_that_cannot_be_read_is_refused(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(ModelError, match=r"tokenizer\.json: missing"):
        load_tokenizer(open_checkpoint(tmp_path, "dummy"))
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(ModelError, match=r"tokenizer\.json: damaged"):
        load_tokenizer(open_checkpoint(tmp_path, "dummy"))
    original = train("gpt-2")
    original.decoder = decoders.WordPiece()
    with pytest.raises(ModelError, match=r"decoder \(WordPiece\) is not supported; supported are"):
        write_folder(tmp_path, original)


def test_a_model_without_template_has_no_chat() -> None:
    ours = from_keys(byte_level_keys(train("gpt-2"), "gpt-2"))
    assert ours.chat is None
    with pytest.raises(RequestError, match=r"no chat template.*/v1/completions") as caught:
        ours.encode_chat([{"role": "user", "content": "hi"}])
    assert caught.value.param == "messages"


def test_text_that_is_not_unicode_is_the_client_s_error() -> None:
    ours = from_keys(byte_level_keys(train("gpt-2"), "gpt-2"))
    with pytest.raises(RequestError, match="surrogate at character 1") as caught:
        ours.encode("a\ud800")
    assert caught.value.param == "prompt"


def test_other_threads_go_on_while_a_long_text_is_encoded(smollm2_path: Path) -> None:
    """A thread is no use to an event loop if it holds the interpreter's lock."""
    ours = load_tokenizer(open_checkpoint(smollm2_path))
    text = "lorem ipsum dolor sit amet " * 40_000
    turns, began = 0, threading.Event()

    def encode() -> None:
        began.set()
        ours.encode(text)

    thread = threading.Thread(target=encode)
    thread.start()
    began.wait()
    while thread.is_alive():
        turns += 1
        time.sleep(0)
    assert turns > 50
