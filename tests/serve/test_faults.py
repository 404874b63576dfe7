"""A public catalogue of 122 faults of inference servers, each as a check of its kind.

Ids are the catalogue's. A case is a test here whose name has its id, or it is shown by a test
elsewhere (`ELSEWHERE`, checked to exist).
"""

from __future__ import annotations

import ast
import collections
import json
import re
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.serve.fakes import FakeEngine, wait_for
from tests.serve.fakes import serving as serving_fake
from tests.serve.live import Live, serving
from toque.kernels.ref.sampler import RowSampler
from toque.metrics import Metrics
from toque.serve.tokenizer import _sentencepiece_bytes
from toque.types import Counters, Logprob, Request, RowSetup, SamplingParams, StepReport, ToEngine

TESTS = Path(__file__).resolve().parents[1]
TEXT, CHAT = "/v1/completions", "/v1/chat/completions"
CONTEXT, ROWS, BLOCK, VOCAB = 256, 4, 16, 259

ALL_IDS = """
RV01 RV02 RV04 RV05 RV07 RV08 RV10 RV11 RV13 RV14 RV16 RV17 RV19 RV20 RV22 RV23 RV25 RV26 RV28 RV29
RV31 TK02 TK03 TK05 TK06 TK08 TK09 TK11 TK12 TK14 TK15 SP01 SP03 SP04 SP06 SP07 SP09 SP10 SP12 SP13
SP15 SP16 SP18 KV01 KV02 KV04 KV05 KV07 KV08 KV10 KV11 KV13 KV14 KV16 KV17 KV19 KV20 KV22 KV23 SV02
SV03 SV05 SV06 SV08 SV09 SV11 SV12 SV14 SV15 SV17 SV18 SV20 SV21 SV23 SV24 SV26 SV27 SV29 SV30 ST01
ST03 ST04 ST06 ST07 ST09 ST10 ST12 ST13 ST15 ST16 ST18 ST19 ST21 ST22 ST24 ML01 ML02 ML04 ML05 ML07
ML08 ML10 ML11 ML13 ML14 DG02 DG03 DG05 DG06 DG08 DG09 DG11 DG12 DG14 DG15 OB01 OB03 OB04 OB06 OB07
OB09 OB10
""".split()  # noqa: SIM905

ELSEWHERE = {
    "TK02": "unit/test_tokenizer.py::test_any_ids_decode_as_the_original_does_whole_or_streamed",
    "TK03": "unit/test_text_stream.py::test_text_is_what_the_bytes_decode_to_cut_by_the_rule",
    "TK05": "unit/test_tokenizer.py::test_a_chat_has_those_that_its_template_writes",
    "TK06": "unit/test_tokenizer.py::test_is_added_where_the_file_says_so_and_never_twice",
    "SP18": "unit/test_known_tokens.py::test_padding_is_never_chosen_nor_listed",
    "KV04": "engine/test_scheduler.py::test_first_come_first_served",
    "KV07": "engine/test_scheduler.py::test_decodes_are_not_stopped_by_a_long_prompt",
    "KV08": "engine/test_scheduler.py::test_a_short_prompt_is_not_stuck_behind_a_long_one",
    "KV22": "model/test_spec.py::test_a_sliding_window_bounds_the_context",
    "ST06": "structured/test_grammars.py::test_the_cache_is_bounded",
    "DG02": "unit/test_handover.py::test_a_fetch_without_room_waits_and_then_gives_up",
    "DG03": "unit/test_fleet.py::test_dg03_dg08_an_abort_reaches_both_sides_at_once",
    "DG08": "unit/test_fleet.py::test_dg03_dg08_an_abort_reaches_both_sides_at_once",
    "DG12": "unit/test_fleet.py::test_dg12_every_request_ends_once_whoever_comes_and_goes",
    "DG05": "unit/test_handover.py::test_an_abort_while_pages_are_under_way",
    "DG06": "serve/test_disagg.py::test_prompts_survive_the_engine_that_computes_them",
    "DG09": "serve/test_disagg.py::test_the_same_tokens_as_one_engine",
    "DG11": "serve/test_disagg.py::test_streams_survive_their_engine",
    "DG14": "unit/test_transports.py::test_strangers_and_nonsense_are_counted_and_closed",
    "DG15": "unit/test_handover.py::test_what_enters_the_tree_is_right_whatever_happens",
    "SV03": "serve/test_api_life.py::test_health_is_progress_not_a_pulse",
    "SV05": "serve/test_api_life.py::test_routes_wait_for_the_model",
    "SV06": "unit/test_tokenizer.py::test_other_threads_go_on_while_a_long_text_is_encoded",
    "SV08": "serve/test_api_life.py::test_first_signal_lets_running_calls_finish",
    "SV09": "serve/test_api_security.py::test_every_route_needs_a_key_but_health_and_ready",
    "SV11": "serve/test_api_security.py::test_wrong_keys_are_401",
    "SV12": "serve/test_api_security.py::test_a_head_without_end_is_431",
    "SV20": "arch/test_structure.py::test_sizes_and_manners",
    "SV23": "serve/test_end_to_end.py::test_a_reader_that_does_not_read_is_cut_off",
    "SV24": "serve/test_api_life.py::test_one_failed_request_leaves_its_neighbours_alone",
    "ML01": "model/test_dense_gguf.py::test_qwen2_tied",
    "ML02": "model/test_spec.py::test_a_head_that_contradicts_tied_embeddings_is_refused",
    "ML04": "unit/test_safetensors.py::test_a_missing_shard_and_a_missing_tensor_are_named",
    "ML05": "unit/test_safetensors.py::test_a_tensor_in_two_shards_is_refused",
    "ML07": "unit/test_end_tokens.py::test_hugging_face_folders_give_the_union_of_both_configs",
    "ML08": "model/test_spec.py::test_old_and_new_rope_forms_mean_the_same",
    "ML10": "unit/test_tokenizer.py::test_ids_and_text_equal_the_published_tokenizer_s",
    "ML14": "model/test_spec.py::test_a_missing_weight_is_named",
    "RV23": "serve/test_tools_live.py::test_rv23_a_history_of_calls_is_replayed",
    "ST13": "serve/test_tools_live.py::test_st13_streamed_arguments_are_the_whole_ones",
    "ST15": "serve/test_tools_live.py::test_st15_both_modes_end_in_the_same_way",
    "ST16": "serve/test_tools_live.py::test_st16_none_makes_no_call",
    "ST18": "serve/test_tools_live.py::test_st18_a_cut_call_ends_with_length",
    "ST19": "serve/test_tools_live.py::test_st19_malformed_tools_are_400_and_nothing_dies",
    "ST24": "serve/test_tools_live.py::test_st24_descriptions_are_only_words",
    "OB10": "engine/test_handover_timeline.py::"
    "test_ob10_the_parts_of_the_time_to_the_first_token_add_up_to_it",
    "OB09": "serve/test_api_metrics.py::test_http_labels_are_bounded",
}


def test_every_case_is_accounted_for_once() -> None:
    here = [i.upper() for name in globals() if name.startswith("test_")
            for i in re.findall(r"[a-z]{2}\d\d", name)]  # fmt: skip
    assert sorted([*here, *ELSEWHERE]) == sorted(ALL_IDS)
    assert len(ALL_IDS) == 122


@pytest.mark.parametrize(("case", "place"), ELSEWHERE.items())
def test_shown_elsewhere(case: str, place: str) -> None:
    path, _, name = place.partition("::")
    tree = ast.parse((TESTS / path).read_text())
    assert any(isinstance(node, ast.FunctionDef) and node.name == name for node in ast.walk(tree))


# -------------------------------------------------------------------------------- the server


class Talk:
    """Shortcuts over a running server; every 4xx must have the one error shape."""

    def __init__(self, live: Live) -> None:
        self.live = live
        self.http = httpx.Client(base_url=live.url, timeout=60)

    def post(self, path: str, body: Any) -> tuple[int, Any]:
        content = body if isinstance(body, bytes) else json.dumps(body).encode()
        answer = self.http.post(path, content=content)
        data = json.loads(answer.content, parse_constant=_no_constant)
        if answer.status_code >= 400:
            assert set(data) == {"error"} and len(answer.content) < 2000
            assert set(data["error"]) == {"message", "type", "param", "code"}
        return answer.status_code, data

    def comp(self, prompt: Any = "1 2 3", **extra: Any) -> tuple[int, Any]:
        return self.post(TEXT, {"prompt": prompt, **extra})

    def chat(self, content: Any = "hi", **extra: Any) -> tuple[int, Any]:
        return self.post(CHAT, {"messages": [{"role": "user", "content": content}], **extra})

    def choice(self, prompt: Any = "1 2 3", **extra: Any) -> Any:
        status, body = self.comp(prompt, **extra)
        assert status == 200, body
        return body["choices"][0]

    def text(self, prompt: Any = "1 2 3", **extra: Any) -> str:
        found: str = self.choice(prompt, **extra)["text"]
        return found

    def refuses(self, param: str, path: str = TEXT, **body: Any) -> None:
        """400 that names the field; and the server goes on."""
        base = {"prompt": "x"} if path == TEXT else {"messages": [{"role": "user", "content": "x"}]}
        status, data = self.post(path, {**base, "max_tokens": 4, **body})
        assert status == 400 and data["error"]["param"].startswith(param), data
        assert self.comp(max_tokens=1)[0] == 200

    def events(self, path: str, leave_after: int | None = None, **body: Any) -> list[Any]:
        found: list[Any] = []
        with self.http.stream("POST", path, json={"stream": True, **body}) as answer:
            assert answer.status_code == 200, answer.read()
            for line in answer.iter_lines():
                if line == "data: [DONE]":
                    return found
                if line:
                    found.append(json.loads(line[6:]))
                if len(found) == leave_after:
                    return found
        raise AssertionError("a stream ended without [DONE]")

    def together(self, *calls: Callable[[], Any]) -> list[Any]:
        with ThreadPoolExecutor(len(calls)) as pool:
            return [future.result() for future in [pool.submit(call) for call in calls]]


def _no_constant(name: str) -> None:
    raise AssertionError(f"{name} is not JSON")


@pytest.fixture(scope="module")
def server(tiny_config: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Talk]:
    """Small on purpose: four rows, and pages for little more than one longest sequence."""
    flags = ("--load-format", "dummy", "--served-model-name", "tiny", "--max-num-seqs", str(ROWS),
             "--max-model-len", str(CONTEXT), "--max-num-batched-tokens", "32",
             "--kv-cache-memory-bytes", str(768 * (CONTEXT + 4 * BLOCK)))  # fmt: skip
    with serving(str(tiny_config), tmp_path_factory.mktemp("faults"), *flags) as live:
        talk = Talk(live)
        yield talk
        talk.http.close()
        live.wait_idle()
        assert live.metric("toque_anomalies_total") == 0


# ------------------------------------------------------------------------ request validation

FAR = 99_999_999


def test_rv01_logit_bias_outside_the_vocabulary(server: Talk) -> None:
    for path in (TEXT, CHAT):
        for key in (str(FAR), str(VOCAB), "-1", "1.5", "x"):
            server.refuses("logit_bias", path, logit_bias={key: -100, "12": 5})
    assert server.comp(logit_bias={str(VOCAB - 1): -100}, max_tokens=1)[0] == 200


def test_rv02_stop_ids_outside_the_vocabulary_harm_no_neighbour(server: Talk) -> None:
    body = {"temperature": 0, "max_tokens": 40, "ignore_eos": True}
    quiet = server.text("neighbour", **body)
    bad = lambda: server.refuses("stop_token_ids", stop_token_ids=[FAR], min_tokens=1)  # noqa: E731
    found = server.together(lambda: server.text("neighbour", **body), bad, bad, bad)
    assert found[0] == quiet
    server.refuses("stop_token_ids", stop_token_ids=[-1], min_tokens=1)


def test_rv04_rv05_empty_prompts(server: Talk) -> None:
    for prompt in ("", [""], [], [[]]):
        server.refuses("prompt", prompt=prompt)
    assert server.chat("", max_tokens=2)[0] == 200
    server.refuses("messages", CHAT, messages=[])


def test_rv07_rv08_top_k(server: Talk) -> None:
    for k in (9_999_999, 0, -1, 1, VOCAB):
        assert server.comp(top_k=k, temperature=1, max_tokens=4)[0] == 200
    for k in (-2, 0.01, True, "1"):
        server.refuses("top_k", top_k=k)


@pytest.mark.parametrize(
    "field",
    ['"temperature":NaN', '"temperature":Infinity', '"temperature":-1', '"temperature":1e999',
     '"top_p":-1', '"top_p":0', '"top_p":1.5', '"repetition_penalty":0', '"presence_penalty":NaN',
     '"min_p":-0.1', '"min_p":2', '"temperature":1e30', '"frequency_penalty":-1e308'],
)  # fmt: skip
def test_rv10_extreme_floats(server: Talk, field: str) -> None:
    for path, base in (
        (TEXT, '"prompt":"x"'),
        (CHAT, '"messages":[{"role":"user","content":"x"}]'),
    ):
        assert server.post(path, f"{{{base},{field}}}".encode())[0] == 400
    assert server.comp(max_tokens=1)[0] == 200


def test_rv11_seeds(server: Talk) -> None:
    for seed in (2**63 - 1, -(2**63)):
        assert server.comp(seed=seed, temperature=1, max_tokens=1)[0] == 200
    for seed in (2**63, 2**64, -(2**63) - 1, 10**40):
        server.refuses("seed", seed=seed)


def test_rv13_rv28_widths_of_logprobs(server: Talk) -> None:
    for wrong in (-1, 21, VOCAB, 10**9, 2.5, True, "a"):
        server.refuses("top_logprobs", CHAT, logprobs=True, top_logprobs=wrong)
        server.refuses("prompt_logprobs", prompt_logprobs=wrong)
        server.refuses("logprobs", logprobs=wrong)


def test_rv14_a_prompt_is_scored_with_max_tokens_0(server: Talk) -> None:
    status, body = server.comp("Answer: Yes", echo=True, logprobs=1, max_tokens=0)
    assert status == 200 and body["usage"]["completion_tokens"] == 0
    assert body["choices"][0]["text"] == "Answer: Yes"
    server.refuses("max_tokens", max_tokens=0)
    server.refuses("max_tokens", max_tokens=-1, echo=True)


def test_rv16_kv01_kv02_the_limit_that_is_told_is_the_one_that_holds(server: Talk) -> None:
    limit = server.http.get("/v1/models").json()["data"][0]["max_model_len"]
    assert limit == CONTEXT
    for size in range(limit - 18, limit):
        status, body = server.comp([5 + size % 9] * size, max_tokens=1)
        assert status == 200 and body["usage"]["prompt_tokens"] == size
    for size in (limit, limit + 1, limit + 16, 20 * limit):
        status, body = server.comp([7] * size, max_tokens=1)
        assert status == 400 and str(size) in body["error"]["message"]
        assert str(limit) in body["error"]["message"]
    full = server.comp([7] * (limit - 1), max_tokens=9, ignore_eos=True)[1]
    assert full["usage"]["completion_tokens"] == 1
    found = server.together(
        lambda: server.comp([7] * 5 * limit, max_tokens=4),
        *[lambda: server.comp("hi", max_tokens=4)] * 3,
    )
    assert [status for status, _ in found] == [400, 200, 200, 200]


@pytest.mark.parametrize("kind", [None, "text/plain", "application/x-www-form-urlencoded", "x"])
def test_rv17_content_types(server: Talk, kind: str | None) -> None:
    headers = {"content-type": kind} if kind else {}
    answer = server.http.post(TEXT, content=b'{"prompt":"x","max_tokens":1}', headers=headers)
    assert answer.status_code == 200


def schema_format(schema: Any) -> dict[str, Any]:
    return {"type": "json_schema", "json_schema": {"name": "n", "schema": schema}}


def test_rv19_st01_wrong_schemas_are_refused_with_their_place(server: Talk) -> None:
    schemas = ({"type": "zigzag"}, {"type": "object", "required": 5}, {"$ref": "#/$defs/none"},
               {"type": "array", "items": [{"type": "string"}]},
               {"type": "string", "pattern": "(["}, {"enum": []},
               {"minimum": 5, "maximum": 1, "type": "integer"},
               True, [], "x", None)  # fmt: skip
    formats: list[Any] = [schema_format(schema) for schema in schemas]
    formats += [{"type": "json_schema", "schema": {}}, {"type": "json_schema"}]
    formats += [{"type": "zigzag"}, {}, "x", 5]
    for form in formats:
        server.refuses("response_format", CHAT, response_format=form)
    nested = schema_format({"properties": {"a": {"items": {"type": "zigzag"}}}})
    status, body = server.chat(response_format=nested)
    assert status == 400 and "/properties/a/items" in body["error"]["message"]
    assert server.chat(max_tokens=1, response_format={"type": "text"})[0] == 200


def wide_schema(depth: int) -> Any:
    schema: Any = {"type": "integer"}
    for level in range(depth):
        names = [f"k{level}_{i}" for i in range(3)]
        schema = {
            "oneOf": [
                {"type": "object", "properties": {name: schema}, "required": [name]}
                for name in names
            ]
        }
    return schema


def test_st03_st04_schemas_that_explode_hold_nobody_up(server: Talk) -> None:
    free = {"temperature": 0, "max_tokens": 40, "ignore_eos": True}
    quiet = server.text("neighbour", **free)
    explodes = schema_format({"type": "string", "pattern": "^(a|b)*a(a|b){28}$"})

    def bound(form: Any) -> tuple[int, Any]:
        return server.chat(max_tokens=20, response_format=form)

    found = server.together(
        lambda: bound(explodes), lambda: bound(schema_format(wide_schema(9))),
        lambda: bound(schema_format(wide_schema(6))),
        *(lambda: server.text("neighbour", **free) for _ in range(4)),
    )  # fmt: skip
    assert [status for status, _ in found[:3]] == [200, 400, 400]
    assert found[3:] == [quiet] * 4
    text = found[0][1]["choices"][0]["message"]["content"]
    assert re.fullmatch('"[ab]*', text), "cut, and on its way to a match"


def bound_text(server: Talk, schema: Any, max_tokens: int, seed: int) -> tuple[str, Any]:
    form = schema_format(schema)
    status, body = server.chat("pick", max_tokens=max_tokens, seed=seed, response_format=form)
    assert status == 200, body
    choice = body["choices"][0]
    return choice["message"]["content"], choice["finish_reason"]


def record(**properties: Any) -> Any:
    return {"type": "object", "properties": properties, "required": list(properties),
            "additionalProperties": False}  # fmt: skip


@pytest.mark.parametrize("value", [{"type": "string"}, {}], ids=["type", "no type"])
def test_st09_no_keyword_is_dropped(server: Talk, value: Any) -> None:
    schema = record(c={**value, "pattern": "^[A-F]+$", "maxLength": 4})
    for seed in range(6):
        text, reason = bound_text(server, schema, 200, seed)
        if reason == "stop":
            made = json.loads(text)["c"]
            assert not isinstance(made, str) or re.fullmatch("[A-F]{1,4}", made)


def test_st10_pattern_properties(server: Talk) -> None:
    for patterns in ({"^mark$": {"type": "integer"}}, {"a": {}}):
        schema = {**record(mark={"type": "integer"}), "patternProperties": patterns}
        server.refuses("response_format.json_schema.schema", CHAT,
                       response_format=schema_format(schema))  # fmt: skip
    schema = {**record(mark={"type": "integer", "maximum": 9, "minimum": 0}),
              "patternProperties": {"^x": {"type": "boolean"}}}  # fmt: skip
    reasons = set()
    for seed in range(12):
        text, reason = bound_text(server, schema, 220, seed)
        reasons.add(reason)
        assert reason == "length" or 0 <= json.loads(text)["mark"] <= 9
    assert "stop" in reasons


def test_st12_values_that_are_not_ascii(server: Talk) -> None:
    values = ["café", "你好", "😀", 'a"b', "c\\d", "\n", ""]
    reasons = set()
    for seed in range(12):
        text, reason = bound_text(server, record(v={"enum": values}), 220, seed)
        reasons.add(reason)
        assert "\ufffd" not in text or reason == "length"
        assert reason == "length" or json.loads(text)["v"] in values
    assert "stop" in reasons


def test_rv20_an_error_does_not_repeat_its_cause(server: Talk) -> None:
    for items in ([{"type": "text", "text": 5}] * 5000, [7] * 5000, ["x" * 10_000] * 50):
        assert server.chat(items)[0] == 400  # `post` bounds the body
    server.refuses("stop_token_ids", stop_token_ids=["x"] * 50_000)


def test_rv22_an_id_is_free_again_after_an_abort(server: Talk) -> None:
    for _ in range(10):
        server.events(TEXT, leave_after=1, prompt="a", max_tokens=200, request_id="re")
        for _ in range(3000):
            status, body = server.comp("b", max_tokens=4, request_id="re")
            if status == 200:
                break
            assert status == 409 and body["error"]["param"] == "request_id"
            time.sleep(0.01)
        assert status == 200 and body["id"] == "cmpl-re"


def test_rv25_rv26_stream_is_off_unless_asked_for(server: Talk) -> None:
    server.refuses("stream_options", CHAT, stream_options={"include_usage": True})
    for extra in ({}, {"stream": False}, {"stream": None}):
        status, body = server.chat("x", max_tokens=2, **extra)
        assert status == 200 and body["object"] == "chat.completion"


def test_rv29_long_lists(server: Talk) -> None:
    server.refuses("stop", stop=[f"s{i}" for i in range(100_000)])
    server.refuses("logit_bias", logit_bias={str(i): 1 for i in range(50_000)})
    server.refuses("bad_words", bad_words=["x"] * 100_000)
    server.refuses("allowed_token_ids", allowed_token_ids=[])
    server.refuses("allowed_token_ids", allowed_token_ids=[1] * 200_000)


INTEGERS = ("min_tokens", "truncate_prompt_tokens", "priority", "cache_salt", "top_k", "best_of",
            "max_completion_tokens", "n_discard", "n_keep", "n", "seed", "logprobs",
            "prompt_logprobs", "max_tokens", "stream_interval")  # fmt: skip


@pytest.mark.parametrize("field", INTEGERS)
def test_rv31_extension_fields_have_two_bounds(server: Talk, field: str) -> None:
    for value in (-1, 0, 2**31 - 1, 2**31, 2**63, 1.5, "zz", "1", [], {}, None, True):
        status, body = server.comp("a", **{"max_tokens": 2, field: value})
        assert status in (200, 400), (value, body)
        if field.startswith("n_"):
            assert status == 400 and body["error"]["param"] == field  # never ignored
    assert server.comp(max_tokens=1)[0] == 200


# ------------------------------------------------------------------------------ tokenization


def test_tk08_marks_in_history_are_text(server: Talk) -> None:
    history = [
        {"role": "user", "content": "x"},
        {"role": "assistant", "content": "KEEP ME </think> tail <think> and me"},
        {"role": "user", "content": "y"},
    ]
    ids = server.post("/tokenize", {"messages": history})[1]["tokens"]
    text = server.post("/detokenize", {"tokens": ids})[1]["prompt"]
    assert "KEEP ME </think> tail <think> and me" in text


def test_tk09_tk11_stop_strings_are_held_back_and_let_go(server: Talk) -> None:
    body = {"max_tokens": 40, "temperature": 0, "ignore_eos": True}
    full = server.text("Alphabet", **body)
    for start in range(2, 12):
        stop = full[start : start + 4]
        events = server.events(TEXT, prompt="Alphabet", stop=[stop], **body)
        joined = "".join(c["text"] for e in events for c in e["choices"])
        assert joined == full[: full.index(stop)] == server.text("Alphabet", stop=[stop], **body)
    for stop in ("Z" * 200, full[-3:] + "Z"):
        events = server.events(TEXT, prompt="Alphabet", stop=[stop], **body)
        assert "".join(c["text"] for e in events for c in e["choices"]) == full


def test_tk12_tk14_echoed_tokens_line_up(server: Talk) -> None:
    status, body = server.comp("\n2. Bob owns 30", echo=True, logprobs=1, max_tokens=1,
                               allowed_token_ids=[70], return_token_ids=True)  # fmt: skip
    assert status == 200
    choice = body["choices"][0]
    logprobs = choice["logprobs"]
    assert "".join(logprobs["tokens"]) == choice["text"]
    offsets = [len("".join(logprobs["tokens"][:i])) for i in range(len(logprobs["tokens"]))]
    assert logprobs["text_offset"] == offsets
    assert [i for i, v in enumerate(logprobs["token_logprobs"]) if v is None] == [0]
    assert len(choice["prompt_token_ids"]) == body["usage"]["prompt_tokens"]


def test_tk15_logprobs_give_the_bytes_back(server: Talk) -> None:
    for seed in range(5):
        choice = server.chat("x", max_tokens=40, logprobs=True, top_logprobs=2, seed=seed)[1][
            "choices"
        ][0]
        data = b"".join(bytes(token["bytes"]) for token in choice["logprobs"]["content"])
        assert data.decode("utf-8", "replace") == choice["message"]["content"]


# ---------------------------------------------------------------------------------- sampling


def test_sp01_sp03_sp04_neighbours_do_not_matter(server: Talk) -> None:
    """Seeded, greedy and penalized requests in one batch, five times over."""
    calls: list[dict[str, Any]] = [
        {"prompt": "Water boils at", "seed": 42, "temperature": 0.8},
        {"prompt": "Once upon", "temperature": 0},
        {"prompt": "red, red, red,", "temperature": 0},
        {"prompt": "red, red, red, and more", "temperature": 0, "frequency_penalty": 1.05},
        {"prompt": "Once upon", "temperature": 1.2, "seed": 1},
        {"prompt": "Once upon", "temperature": 1.2, "seed": 2},
    ]
    ask = [lambda c=call: server.text(max_tokens=24, ignore_eos=True, **c) for call in calls]
    noise = lambda: server.text("Tell me", temperature=1.5, max_tokens=30)  # noqa: E731
    alone = [call() for call in ask]
    assert alone[4] != alone[5]
    for _ in range(5):
        assert server.together(*ask, noise, noise)[: len(ask)] == alone


def test_sp06_a_penalty_reaches_back_over_everything() -> None:
    logits = np.full(50, 1.0, dtype=np.float32)
    history = (7, *[3] * 60, 9)
    params = SamplingParams(temperature=0, seed=0, repetition_penalty=2.0)
    setup = RowSetup(row=0, sampling=params, pages=(), end_token_ids=(),
                     choice=0, num_prompt=1, history=history)  # fmt: skip
    adjusted = RowSampler(setup)._adjust(logits, len(history))
    assert adjusted[7] == adjusted[9] == adjusted[3] == 0.5
    assert adjusted[8] == 1.0


def test_sp07_sp10_min_tokens_counts_output_and_nothing_ends_it_early(server: Talk) -> None:
    stops = [chr(i) for i in range(97, 107)] + ["\n", "e", "�"]
    body = server.comp("path/", stop=stops, min_tokens=20, max_tokens=20, temperature=0)[1]
    assert body["usage"]["completion_tokens"] == 20
    server.refuses("min_tokens", min_tokens=9, max_tokens=3)
    body = server.comp([5] * 100, min_tokens=32, max_tokens=32, ignore_eos=True)[1]
    assert body["usage"]["completion_tokens"] == 32
    assert body["choices"][0]["finish_reason"] == "length"


_IDS = st.lists(st.integers(0, 300), max_size=4).map(tuple)


@given(
    st.builds(
        SamplingParams,
        temperature=st.floats(0, 2), top_k=st.integers(0, 9), min_tokens=st.integers(0, 9),
        seed=st.none() | st.integers(0, 2**63 - 1), stop_token_ids=_IDS, allowed_token_ids=_IDS,
        bad_words=st.lists(_IDS, max_size=3).map(tuple), logprobs=st.none() | st.integers(0, 20),
        prompt_logprobs=st.none() | st.integers(0, 20), max_tokens=st.none() | st.integers(0, 9),
        logit_bias=st.dictionaries(st.integers(0, 300), st.floats(-100, 100), max_size=3),
        stop=st.lists(st.text(max_size=4), max_size=2).map(tuple), ignore_eos=st.booleans(),
    ),
    st.integers(-(2**31), 2**31 - 1),
)  # fmt: skip
def test_sp09_parameters_survive_the_way_to_the_engine(params: SamplingParams, n: int) -> None:
    sent = Request(
        id="r", prompt=(1, 2), sampling=params, arrived_s=0.5, priority=n, cache_salt="é"
    )
    wire = msgspec.msgpack.encode(sent)
    assert msgspec.msgpack.Decoder(ToEngine).decode(wire) == sent


def test_sp12_json_has_no_infinities(server: Talk) -> None:
    """`post` refuses NaN and Infinity; a minus infinity is the documented floor."""
    for extra in ({"logit_bias": {"5": -100}}, {"allowed_token_ids": [5, 6]}):
        assert server.comp("a", max_tokens=4, logprobs=5, prompt_logprobs=5, **extra)[0] == 200
    from tests.serve.fakes import ByteTokenizer
    from toque.serve.logprobs import CompletionWriter, chat_logprobs, prompt_logprobs

    lost = Logprob(chosen=-np.inf, top=((1, -np.inf),))
    text = CompletionWriter(ByteTokenizer(), True).write([(2, lost)])
    chat = chat_logprobs(ByteTokenizer(), [(2, lost)])
    scores = prompt_logprobs(ByteTokenizer(), [1, 2], [lost], 1)
    for made in (text, chat, scores):
        assert b"-9999" in msgspec.json.encode(made) and b"null" not in msgspec.json.encode(text)


def test_sp13_top_logprobs_are_as_many_as_asked(server: Talk) -> None:
    for k in (0, 1, 5, 20):
        choice = server.chat(logprobs=True, top_logprobs=k, max_tokens=6, temperature=0)[1][
            "choices"
        ][0]
        for token in choice["logprobs"]["content"]:
            values = [top["logprob"] for top in token["top_logprobs"]]
            assert len(values) == k and values == sorted(values, reverse=True)
            assert k == 0 or values[0] == token["logprob"]


def test_sp15_null_is_the_default(server: Talk) -> None:
    base = server.chat("Name", seed=3, max_tokens=12)[1]["choices"][0]["message"]["content"]
    nulls = dict.fromkeys(
        ("temperature", "top_p", "top_k", "min_p", "stop", "logit_bias", "n", "presence_penalty",
         "repetition_penalty", "bad_words", "allowed_token_ids", "truncate_prompt_tokens")
    )  # fmt: skip
    nulled = server.chat("Name", seed=3, max_tokens=12, **nulls)[1]
    assert nulled["choices"][0]["message"]["content"] == base


def test_sp16_kv16_kv17_cold_and_warm_are_equal_around_page_borders(server: Talk) -> None:
    for size in (1, 15, 16, 17, 31, 32, 33, 48, 64, 65):
        prompt = [3 + (i * 7 + size) % 250 for i in range(size)]
        asked = {"temperature": 0, "max_tokens": 16, "logprobs": 2, "ignore_eos": True}
        bodies = [server.comp(prompt, **asked)[1] for _ in range(4)]
        assert len({json.dumps(b["choices"][0]) for b in bodies}) == 1, size
        hits = [b["usage"]["prompt_tokens_details"]["cached_tokens"] for b in bodies]
        assert hits[-1] == (size - 1) // BLOCK * BLOCK


# ---------------------------------------------------------------------------- scheduler, pages


def test_kv05_crowded_requests_all_get_to_their_end(server: Talk) -> None:
    calls = [
        lambda i=i: server.comp([i + 9] * 100, max_tokens=120, ignore_eos=True, temperature=0)
        for i in range(8)
    ]
    alone = [call()[1]["choices"][0]["text"] for call in calls]
    found = server.together(*calls)
    assert [body["usage"]["completion_tokens"] for _, body in found] == [120] * 8
    assert [body["choices"][0]["text"] for _, body in found] == alone


def test_kv10_kv11_sv02_sv30_who_leaves_leaves_nothing_behind(server: Talk) -> None:
    """In every state: decoding with several choices, waiting, before the first token, unary."""
    long: dict[str, Any] = {"max_tokens": 5000, "ignore_eos": True}

    def impatient() -> None:
        try:
            httpx.post(server.live.url + TEXT, json={"prompt": "a", **long}, timeout=0.05)
        except httpx.TimeoutException:
            return

    server.events(TEXT, leave_after=3, prompt="a", n=4, **long)
    server.together(*[impatient] * 12)
    server.events(TEXT, leave_after=2, prompt="9 8 7", **long)
    assert server.comp("hi", max_tokens=1)[0] == 200
    server.live.wait_idle()  # nothing runs or waits, no page is held


def test_kv13_the_next_turn_after_a_disconnect(server: Talk) -> None:
    history = [9 + i % 200 for i in range(120)]
    cold = server.text([*history, *[5] * 20], max_tokens=4, temperature=0, cache_salt="other")
    for cut in (1, 2, 3):
        server.events(TEXT, leave_after=cut, prompt=history, max_tokens=50, ignore_eos=True)
        body = server.comp([*history, *[5] * 20], max_tokens=4, temperature=0)[1]
        assert body["usage"]["prompt_tokens"] == 140
        assert body["choices"][0]["text"] == cold


def test_kv14_only_equal_tokens_share_pages(server: Talk) -> None:
    warm = [40 + i for i in range(64)]
    other = list(warm)
    other[19] += 31
    other[20] -= 1
    asked = {"max_tokens": 8, "temperature": 0, "logprobs": 1}
    fresh = server.comp(other, cache_salt="unique-salt", **asked)[1]
    server.comp(warm, max_tokens=1)
    body = server.comp(other, **asked)[1]
    assert body["usage"]["prompt_tokens_details"]["cached_tokens"] == 16  # the page before
    assert body["choices"][0] == fresh["choices"][0]


def test_kv19_kv20_prompt_logprobs_are_whole_and_computed(server: Talk) -> None:
    prompt = [20 + i % 200 for i in range(130)]  # five chunks
    asked = {"echo": True, "logprobs": 1, "max_tokens": 1, "temperature": 0}
    cold = server.choice(prompt, **asked)["logprobs"]
    server.comp(prompt[:100], max_tokens=1)
    warm = server.choice(prompt, **asked)["logprobs"]
    assert warm == cold and len(warm["tokens"]) == 131
    events = server.events(TEXT, prompt=prompt, **asked)
    first = events[0]["choices"][0]["logprobs"]
    assert len(first["tokens"]) == 130, "the prompt's part comes once and whole"
    plain = server.events(TEXT, prompt=prompt, max_tokens=3, logprobs=1, ignore_eos=True)
    tokens = [t for e in plain for c in e["choices"] for t in (c["logprobs"] or {})["tokens"]]
    assert len(tokens) == 3 and all(e["choices"][0]["logprobs"]["tokens"] for e in plain)


def test_kv23_more_choices_than_rows(server: Talk) -> None:
    status, body = server.comp("a", n=ROWS + 3, max_tokens=2, temperature=1)
    assert status == 200
    assert [choice["index"] for choice in body["choices"]] == list(range(ROWS + 3))


# ------------------------------------------------------------------------------------ server


def test_sv14_sv15_body_sizes(server: Talk) -> None:
    assert server.post(TEXT, b"[" * 200_000)[0] == 400
    assert server.post(TEXT, b'{"prompt":' + b"[" * 100 + b"1" + b"]" * 100 + b"}")[0] == 400
    assert server.post(TEXT, b'{"prompt":"' + b"\\n" * (9 << 20) + b'"}')[0] == 413
    status, body = server.chat("x" + " " * 1_200_000, max_tokens=1)
    assert status == 400 and body["error"]["code"] == "context_length_exceeded"


def test_sv17_names_are_no_paths(server: Talk) -> None:
    for name in (
        "../../etc/passwd",
        "/etc/passwd",
        "a/../../b",
        "..%2f..%2fx",
        "tiny\x00",
        "C:\\x",
    ):
        status, body = server.chat("x", model=name, max_tokens=1)
        assert status == 404 and "root:" not in json.dumps(body)
        answer = server.http.get("/v1/models/" + name.replace("\x00", "%00"))
        assert answer.status_code in (400, 404)


def test_sv18_template_arguments_reach_nothing_but_the_template(server: Talk) -> None:
    plain = server.post("/tokenize", {"messages": [{"role": "user", "content": "x"}]})[1]["tokens"]
    for name in ("tokenize", "chat_template", "conversation", "tokenizer", "padding", "self"):
        status, body = server.post("/tokenize", {"messages": [{"role": "user", "content": "x"}],
                                                 "chat_template_kwargs": {name: True}})  # fmt: skip
        assert status == 200 and body["tokens"] == plain, name
    for name in ("messages", "tools", "add_generation_prompt", "continue_final_message"):
        server.refuses("chat_template_kwargs", CHAT, chat_template_kwargs={name: True})


def test_sv21_st07_payloads_of_other_engines_are_refused_by_name(server: Talk) -> None:
    for name, value in (("prompt_embeds", "AAAA"), ("grammar", 'root :== "a"'),
                        ("guided_regex", "(("), ("lora_request", {"path": "/"}),
                        ("kv_transfer_params", {})):  # fmt: skip
        server.refuses(name, **{name: value})
    server.refuses("structured_outputs.grammar", structured_outputs={"grammar": 'root :== "a"'})


def test_sv26_sv27_sv29_streams_tell_usage_and_ends_once(server: Talk) -> None:
    body = {"prompt": "a", "n": 3, "max_tokens": 6, "temperature": 1, "ignore_eos": True}
    ends: collections.Counter[int] = collections.Counter()
    for event in server.events(TEXT, **body):
        assert event["choices"] and not event.get("usage")
        for choice in event["choices"]:
            assert not (ends[choice["index"]] and choice["text"])
            ends[choice["index"]] += choice["finish_reason"] is not None
    assert dict(ends) == {0: 1, 1: 1, 2: 1}
    options = {"include_usage": True, "continuous_usage_stats": True}
    events = server.events(TEXT, stream_options=options, **body)
    assert [bool(event["choices"]) for event in events].count(False) == 1
    assert events[-1]["usage"]["completion_tokens"] == 18
    per_choice: dict[int, list[int]] = collections.defaultdict(list)
    for event in events[:-1]:
        per_choice[event["choices"][0]["index"]].append(event["usage"]["completion_tokens"])
    assert all(counts == sorted(counts) and counts[-1] == 6 for counts in per_choice.values())
    assert server.comp(**body)[1]["usage"]["completion_tokens"] == 18


# --------------------------------------------------------------------------- tools, templates


def test_st21_arguments_of_a_history_are_an_object(server: Talk) -> None:
    for arguments in ("[]", "null", "7", '"Lima"', "{bad", '{"a":1}{"b":2}'):
        call = {"id": "c", "type": "function", "function": {"name": "f", "arguments": arguments}}
        history = [{"role": "user", "content": "x"},
                   {"role": "assistant", "content": None, "tool_calls": [call]}]  # fmt: skip
        for stream in (False, True):
            server.refuses("messages[1]", CHAT, messages=history, stream=stream)


def test_st22_without_thinking_all_text_is_content(server: Talk) -> None:
    body = server.chat("hi", max_tokens=20, ignore_eos=True,
                       chat_template_kwargs={"enable_thinking": False})[1]  # fmt: skip
    message = body["choices"][0]["message"]
    assert message["content"] and "reasoning_content" not in message


# ------------------------------------------------------------------------------- model files


def test_ml11_only_two_hex_digits_make_a_byte() -> None:
    assert _sentencepiece_bytes("<0x0A>") == b"\n" and _sentencepiece_bytes("<0xfF>") == b"\xff"
    for text in ("<0x-1>", "<0x100>", "<0xG0>", "<0x0>", "<0x 1>", "<0x>", "x<0x00>"):
        assert _sentencepiece_bytes(text) == text.encode()


def test_ml13_empty_and_scalar_tensors_load(tmp_path: Path) -> None:
    from safetensors.numpy import save_file

    from toque.files.safetensors import read_folder

    kept = {"none": np.zeros((0, 4), np.float32), "scalar": np.array(7, np.float32)}
    save_file(kept, tmp_path / "model.safetensors")
    tensors = read_folder(tmp_path)
    assert tensors["none"].shape == (0, 4) and tensors["none"].data.size == 0
    assert tensors["scalar"].shape == () and tensors["scalar"].data.view(np.float32)[0] == 7


# ----------------------------------------------------------------------------- observability


def test_ob01_no_event_comes_before_the_first_token() -> None:
    engine = FakeEngine(paused=True)
    with serving_fake(engine) as fake:
        body = {"messages": [{"role": "user", "content": "x"}], "stream": True}
        with pytest.raises(httpx.ReadTimeout):
            fake.http.post(CHAT, json=body, timeout=0.3)
        engine.paused = False
        events = fake.stream(CHAT, messages=body["messages"])
        assert events[0]["choices"][0]["delta"]["role"] == "assistant"


def test_ob03_ob04_ob07_counters_add_up_after_mixed_calls(server: Talk) -> None:
    live = server.live
    names = ("calls_received_total", "prompt_tokens_total", "request_prompt_tokens_sum",
             "generation_tokens_total", "request_generation_tokens_sum")  # fmt: skip
    outcomes = ("success", "refused", "cancelled", "failed")

    def take() -> dict[str, float]:
        live.wait_idle()
        live.wait_until("calls in progress", toque_calls_in_progress=0)
        found = {name: live.metric(f"toque_{name}") for name in names}
        return found | {o: live.metric("toque_calls_finished_total", outcome=o) for o in outcomes}

    before = take()
    for _ in range(5):
        server.events(TEXT, leave_after=2, prompt="abandoned", max_tokens=200, ignore_eos=True)
    server.comp("a", n=3, max_tokens=2)
    server.comp("")
    server.comp("a", model="nobody")
    grown = {name: value - before[name] for name, value in take().items()}
    assert grown["calls_received_total"] == 8 == sum(grown[o] for o in outcomes)
    assert grown["refused"] == 2 and grown["failed"] == 0
    assert grown["prompt_tokens_total"] == grown["request_prompt_tokens_sum"]
    assert grown["generation_tokens_total"] == grown["request_generation_tokens_sum"]


def test_a_call_that_is_left_counts_once_and_as_cancelled() -> None:
    with serving_fake(FakeEngine(reply=lambda r: [65] * 400, step_s=0.02)) as fake:
        body = {"prompt": "x", "max_tokens": 400, "n": 3}
        with fake.http.stream("POST", TEXT, json={**body, "stream": True}) as answer:
            next(answer.iter_lines())
        with pytest.raises(httpx.ReadTimeout):
            fake.http.post(TEXT, json=body, timeout=0.2)
        fake.complete(max_tokens=2, n=3)
        wait_for(lambda: "toque_calls_in_progress 0.0" in fake.http.get("/metrics").text)
        text = fake.http.get("/metrics").text
        assert 'toque_calls_finished_total{outcome="cancelled"} 2.0' in text
        assert 'toque_calls_finished_total{outcome="success"} 1.0' in text
        assert "toque_calls_received_total 3.0" in text


def test_ob06_totals_that_go_backwards_are_counted_and_harm_nobody() -> None:
    metrics = Metrics()
    metrics.step(StepReport(counters=Counters(prompt_tokens=9)))
    metrics.step(StepReport(counters=Counters(prompt_tokens=4)))
    metrics.step(StepReport(counters=Counters(prompt_tokens=6)))
    text = metrics.text()
    assert b"toque_anomalies_total 1.0" in text and b"toque_prompt_tokens_total 11.0" in text
