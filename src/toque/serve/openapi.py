"""The OpenAPI document: every route, field, answer and status, made from the code.

Owns: nothing. Knows: the bodies' models, the table of fields, the answers' structs, which statuses
a route may have. Does not know: what any of it does.
"""

from __future__ import annotations

from http import HTTPStatus
from typing import Any

import msgspec
from fastapi import FastAPI
from fastapi.openapi.utils import get_openapi
from pydantic import BaseModel

from toque.metrics import CONTENT_TYPE
from toque.serve import fields
from toque.serve.answers import Answer, TextChoice
from toque.serve.chat_answers import ChatChoice
from toque.serve.dashboard import EVENTS_PATH
from toque.serve.edge import GENERATION_PATHS, MODEL_ROUTE, RESPONSE_ROUTE, TIMELINE_ROUTE
from toque.serve.embeddings import EmbeddingAnswer
from toque.serve.schema import RULES
from toque.types import Load

Json = dict[str, Any]

_REFERENCE = "#/components/schemas/{name}"
_ERROR: Json = {
    "type": "object",
    "required": ["error"],
    "additionalProperties": False,
    "properties": {
        "error": {
            "type": "object",
            "required": ["message", "type", "param", "code"],
            "additionalProperties": False,
            "properties": {
                "message": {"type": "string"},
                "type": {"type": "string"},
                "param": {"type": ["string", "null"]},
                "code": {"type": ["string", "null"]},
            },
        }
    },
}
_TEXT: Json = {"type": "string"}
_NUMBER: Json = {"type": "integer"}
_JSON_TYPES = {str: "string", dict: "object", bool: "boolean"}
_ANSWER_OF = {
    "/v1/completions": "Completion",
    "/v1/chat/completions": "ChatCompletion",
    "/v1/embeddings": "EmbeddingAnswer",
    "/v1/responses": "Response",
    RESPONSE_ROUTE: "Response",
    f"{RESPONSE_ROUTE}/input_items": "Items",
    f"{RESPONSE_ROUTE}/cancel": "Response",
    "/v1/models": "ModelList",
    MODEL_ROUTE: "Model",
    "/tokenize": "Tokens",
    "/detokenize": "Text",
    "/health": "Status",
    "/ready": "Status",
    "/ping": "Status",
    "/load": "Load",
    "/version": "Version",
    TIMELINE_ROUTE: "Timeline",
}
_STREAMING = ("/v1/completions", "/v1/chat/completions", "/v1/responses")
_NAMES_A_MODEL = (*GENERATION_PATHS, MODEL_ROUTE, "/tokenize", "/detokenize")
# Any exchange may end so: a head that is no HTTP or too large, a missing key, a foreign host.
_ANYWHERE = (400, 401, 403, 431, 500, 503)


def document(app: FastAPI) -> Json:
    """The whole document of an application whose routes are complete."""
    made = get_openapi(
        title=app.title, version=app.version, description=_about(), routes=app.routes
    )
    components = made.setdefault("components", {})
    schemas = components.setdefault("schemas", {})
    schemas["Error"] = _ERROR
    schemas.update(_bodies())
    schemas.update(_answers())
    components["securitySchemes"] = {"key": {"type": "http", "scheme": "bearer"}}
    made["security"] = [{"key": []}, {}]  # keys are the operator's choice
    for path, methods in made["paths"].items():
        for method, operation in methods.items():
            operation["responses"] = _responses(path, method)
    return made


def _about() -> str:
    return (
        "OpenAI-compatible. A field is implemented, refused by name with 400, or one of these, "
        f"which do nothing here: {', '.join(fields.NO_OPS)}. The seed of an answer is its "
        "`seed`, and in its toque-seed header."
    )


# -------------------------------------------------------------------------------------- bodies


def _bodies() -> Json:
    """Each body with the fields that are refused or do nothing, so that all three classes show."""
    schemas: Json = {}
    for body, rules in RULES.items():
        schemas |= _body(body, rules)
    schemas["StreamOptions"]["properties"] |= _ruled(fields.STREAM_OPTION_RULES)
    return schemas


def _body(body: type[BaseModel], rules: fields.Rules) -> Json:
    schema = body.model_json_schema(ref_template="#/components/schemas/{model}")
    inner = schema.pop("$defs", {})
    schema["properties"] |= _ruled(rules)
    return {**inner, body.__name__: schema}


def _ruled(rules: fields.Rules) -> Json:
    return {name: _rule(rule) for name, rule in rules.items()}


def _rule(rule: fields.Rule) -> Json:
    if isinstance(rule, fields.Refused):
        about = "Not supported: these values ask for nothing."
        return {"enum": list(rule.neutral), "description": about}
    if rule.values:
        allowed: Json = {"enum": [None, *rule.values]}
    else:
        allowed = {"type": [_JSON_TYPES[rule.kind], "null"]}
    return {**allowed, "description": "Does nothing here."}


# ------------------------------------------------------------------------------------- answers


def _answers() -> Json:
    """The structs that answers are written from, closed: a key that is not listed is a fault."""
    _, schemas = msgspec.json.schema_components(
        [Answer, TextChoice, ChatChoice, EmbeddingAnswer], ref_template=_REFERENCE
    )
    for schema in schemas.values():
        schema["additionalProperties"] = False
    frame = schemas.pop("Answer")
    for name, choice in (("Completion", TextChoice), ("ChatCompletion", ChatChoice)):
        choices = {"type": "array", "items": _reference(choice.__name__)}
        properties = {**frame["properties"], "choices": choices}
        schemas[name] = {**frame, "title": name, "properties": properties}
    found: Json = schemas
    return {**found, **_PLAIN}


def _reference(name: str) -> Json:
    return {"$ref": _REFERENCE.format(name=name)}


def _closed(**properties: Json) -> Json:
    return {
        "type": "object",
        "properties": properties,
        "required": list(properties),
        "additionalProperties": False,
    }


def _load_fields() -> Json:
    _, schemas = msgspec.json.schema_components([Load], ref_template=_REFERENCE)
    return {name: schemas["Load"]["properties"][name] for name in Load.__struct_fields__}


_MODEL = _closed(
    id=_TEXT,
    object={"const": "model"},
    created=_NUMBER,
    owned_by=_TEXT,
    root=_TEXT,
    parent={"type": "null"},
    max_model_len=_NUMBER,
)
_PLAIN: Json = {
    "Model": _MODEL,
    "ModelList": _closed(
        object={"const": "list"}, data={"type": "array", "items": _reference("Model")}
    ),
    "Tokens": _closed(
        count=_NUMBER,
        max_model_len=_NUMBER,
        tokens={"type": "array", "items": _NUMBER},
        token_strs={"type": ["array", "null"], "items": _TEXT},
    ),
    "Text": _closed(prompt=_TEXT),
    # OpenAI's Response and its items, whose kinds are theirs to describe.
    "Response": {"type": "object", "required": ["id", "object", "status", "output"]},
    "Items": _closed(
        object={"const": "list"}, data={"type": "array"}, has_more={"type": "boolean"}
    ),
    "Deleted": _closed(id=_TEXT, object={"const": "response"}, deleted={"type": "boolean"}),
    "Status": _closed(status=_TEXT),
    "Version": _closed(version=_TEXT),
    "Timeline": {"type": "object", "required": ["id", "sequences"]},
    "Load": _closed(server_load=_NUMBER, **_load_fields()),
}

# ----------------------------------------------------------------------------------- responses


def _responses(path: str, method: str) -> Json:
    answers = {200: {"description": _about_answer(path), "content": _content(path, method)}}
    failure = {"application/json": {"schema": _reference("Error")}}
    for status in _statuses(path, method):
        answers[status] = {"description": HTTPStatus(status).phrase, "content": failure}
    return {str(status): answers[status] for status in sorted(answers)}


def _about_answer(path: str) -> str:
    events = "; with `stream` events of `data:` and JSON, then `data: [DONE]`"
    return "The answer" + (events if path in _STREAMING else "")


def _content(path: str, method: str) -> Json:
    if path == "/metrics":
        return {CONTENT_TYPE.partition(";")[0]: {"schema": _TEXT}}
    if path == EVENTS_PATH:
        return {"text/event-stream": {}}
    name = "Deleted" if method == "delete" else _ANSWER_OF[path]
    content: Json = {"application/json": {"schema": _reference(name)}}
    if path in _STREAMING:
        content["text/event-stream"] = {}  # OpenAPI 3.1 has no schema of one event
    return content


def _statuses(path: str, method: str) -> tuple[int, ...]:
    names = path in (*_NAMES_A_MODEL, TIMELINE_ROUTE) or path.startswith(RESPONSE_ROUTE)
    named = (404,) if names else ()
    read = (413,) if method == "post" and path != "/ping" else ()
    generating = (409, 429) if path in GENERATION_PATHS else ()
    watching = (429,) if path == EVENTS_PATH else ()
    return (*_ANYWHERE, *named, *read, *generating, *watching)
