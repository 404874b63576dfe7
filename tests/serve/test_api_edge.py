"""The edge: one error shape on every route, foreign hosts and origins, the documents."""

from __future__ import annotations

import re
import socket
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from tests.serve.fakes import FakeEngine, ServerThread, error_of, serving, wait_for
from toque.serve.guard import host_name
from toque.types import Refused

ROUTES = [
    ("GET", "/v1/models"), ("GET", "/v1/completions?prompt=x"), ("POST", "/v1/completions"),
    ("POST", "/v1/chat/completions"), ("POST", "/tokenize"), ("POST", "/detokenize"),
    ("GET", "/health"), ("GET", "/ready"), ("GET", "/version"), ("GET", "/metrics"),
    ("GET", "/docs"), ("GET", "/openapi.json"),
]  # fmt: skip


@pytest.fixture(scope="module")
def server() -> Iterator[ServerThread]:
    with serving(allowed_hosts=("My.Box",), allowed_origins=("https://app.example",)) as server:
        yield server


def raw(server: ServerThread, data: bytes) -> bytes:
    """What the server answers to these bytes, until it closes."""
    with socket.create_connection(("127.0.0.1", server.port)) as connection:
        connection.settimeout(60)
        connection.sendall(data)
        parts = []
        while part := connection.recv(65536):
            parts.append(part)
    return b"".join(parts)


# ------------------------------------------------------------------------------- error shapes


@pytest.mark.parametrize("path", ["/nope", "/v1", "/v1/nope", "/v1/models/", "//v1/models", "/x/"])
def test_unknown_routes_are_404_in_the_one_shape(server: ServerThread, path: str) -> None:
    answer = server.http.get(server.url + path)
    assert answer.status_code == 404
    assert error_of(answer)["code"] == "not_found"


@pytest.mark.parametrize("method,path", ROUTES)
def test_wrong_methods_are_405_in_the_one_shape(
    server: ServerThread, method: str, path: str
) -> None:
    answer = server.http.request("DELETE", path)
    assert answer.status_code == 405
    assert method in answer.headers["allow"] or path.startswith("/v1/completions")
    assert error_of(answer)["code"] == "method_not_allowed"


def test_what_is_not_http_gets_the_one_shape(server: ServerThread) -> None:
    answer = raw(server, b"nonsense\r\n\r\n")
    assert answer.startswith(b"HTTP/1.1 400 ")
    assert b'{"error":{"message":' in answer


def test_engine_refusals_keep_their_status() -> None:
    """The first event decides the status line, streaming or not."""
    refusal = Refused(id="", message="too busy", status=429, retry_after_s=2.2)
    with serving(FakeEngine(refuse=refusal)) as server:
        for stream in (False, True):
            body = {"prompt": "x", "stream": stream}
            answer = server.http.post("/v1/completions", json=body)
            assert answer.status_code == 429 and answer.headers["retry-after"] == "3"
            assert error_of(answer)["type"] == "rate_limit_error"


def test_a_bug_is_a_plain_500_and_the_server_goes_on(caplog: Any) -> None:
    def broken(text: str, **kwargs: Any) -> list[int]:
        raise RuntimeError("secret /etc/path")

    with serving() as server:
        server.server.service.tokenizer.encode = broken
        answer = server.http.post("/v1/completions", json={"prompt": "x"})
        assert answer.status_code == 500
        error = error_of(answer)
        assert "secret" not in error["message"] and error["code"] == "internal_error"
        wait_for(lambda: "secret /etc/path" in caplog.text)  # the log has the cause
        del server.server.service.tokenizer.encode
        assert server.complete()["choices"][0]["text"] == "Hello"


# ----------------------------------------------------------------------------- host and origin


def get(server: ServerThread, path: str = "/version", **headers: str) -> httpx.Response:
    named = {name.replace("_", "-"): value for name, value in headers.items()}
    return server.http.get(path, headers=named)


@pytest.mark.parametrize(
    "host",
    ["localhost", "LOCALHOST:9", "localhost.", "127.0.0.1:1", "10.1.2.3", "[::1]:80", "my.box:9",
     "192.168.0.7:8000"],
)  # fmt: skip
def test_own_names_and_addresses_are_served(server: ServerThread, host: str) -> None:
    assert get(server, host=host).status_code == 200


@pytest.mark.parametrize(
    "host",
    ["evil.example", "localhost.evil.example", "127.0.0.1.evil.example", "my.box.evil", "",
     "x" * 5000, "evil@localhost", "localhost,evil", "[evil]"],
)  # fmt: skip
def test_foreign_hosts_are_403_on_every_route(server: ServerThread, host: str) -> None:
    """DNS rebinding: another name that resolves to this address."""
    for method, path in ROUTES[:1] if len(host) > 100 else ROUTES:
        answer = server.http.request(method, path, headers={"host": host})
        assert answer.status_code == 403, (host, path)
        assert error_of(answer)["code"] == "host_not_allowed"
        assert len(answer.content) < 500


def test_two_hosts_are_403_and_none_is_a_probe(server: ServerThread) -> None:
    two = b"GET /version HTTP/1.1\r\nhost: localhost\r\nhost: evil\r\nconnection: close\r\n\r\n"
    assert b" 403 " in raw(server, two)
    assert b" 200 " in raw(server, b"GET /version HTTP/1.0\r\n\r\n")


@pytest.mark.parametrize("method,path", ROUTES)
@pytest.mark.parametrize(
    "origin", ["https://evil.example", "null", "http://localhost:1", "x" * 900]
)
def test_foreign_origins_are_403_on_every_route(
    server: ServerThread, method: str, path: str, origin: str
) -> None:
    """Another port is another origin; a simple GET is no exception."""
    body = b'{"prompt": "x"}'
    answer = server.http.request(method, path, headers={"origin": origin}, content=body)
    assert answer.status_code == 403
    assert error_of(answer)["code"] == "origin_not_allowed"
    assert "access-control-allow-origin" not in answer.headers


def test_own_origin_is_served(server: ServerThread) -> None:
    assert get(server, origin=server.url).status_code == 200
    assert get(server, origin="http://my.box:5", host="my.box:5").status_code == 200


def test_allowed_origin_gets_cors_headers(server: ServerThread) -> None:
    answer = get(server, origin="https://app.example")
    assert answer.status_code == 200
    assert answer.headers["access-control-allow-origin"] == "https://app.example"
    assert answer.headers["vary"] == "Origin"
    assert "access-control-allow-origin" not in get(server).headers


def test_preflight(server: ServerThread) -> None:
    asks = {
        "access-control-request-method": "POST",
        "access-control-request-headers": "content-type, authorization",
    }
    good = server.http.options("/v1/completions", headers={"origin": "https://app.example", **asks})
    assert good.status_code == 200
    assert good.headers["access-control-allow-origin"] == "https://app.example"
    assert "POST" in good.headers["access-control-allow-methods"]
    assert "authorization" in good.headers["access-control-allow-headers"]
    bad = server.http.options("/v1/completions", headers={"origin": "https://evil", **asks})
    assert bad.status_code == 403 and "access-control-allow-origin" not in bad.headers


def test_other_sites_pages_cannot_generate_without_an_origin(server: ServerThread) -> None:
    """Images, scripts and links carry no Origin; the browser says where they come from."""
    path = "/v1/completions?prompt=x"
    for site in ("cross-site", "same-site"):
        assert get(server, path, sec_fetch_site=site, sec_fetch_mode="no-cors").status_code == 403
        assert get(server, path, sec_fetch_site=site, sec_fetch_mode="navigate").status_code == 403
        assert get(server, "/docs", sec_fetch_site=site, sec_fetch_mode="navigate").is_success
    assert get(server, path, sec_fetch_site="none", sec_fetch_mode="navigate").is_success
    assert get(server, path, sec_fetch_site="same-origin", sec_fetch_mode="cors").is_success


def test_star_allows_all() -> None:
    with serving(allowed_hosts=("*",), allowed_origins=("*",)) as server:
        answer = get(server, host="any.where", origin="https://some.page")
        assert answer.headers["access-control-allow-origin"] == "https://some.page"


@pytest.mark.parametrize(
    "value,name",
    [("a:1", "a"), ("[::1]:80", "::1"), ("::1", "::1"), ("A.", "a"), (" b ", "b"), ("[", "")],
)
def test_host_name(value: str, name: str) -> None:
    assert host_name(value) == name


# --------------------------------------------------------------------------------- documents


def test_docs_page_needs_no_outside_host(server: ServerThread) -> None:
    page = server.http.get("/docs")
    assert page.headers["content-type"].startswith("text/html")
    assert not re.search(r"https?://", page.text), "nothing is fetched from elsewhere"
    assert "default-src 'none'" in page.headers["content-security-policy"]


def test_openapi_describes_the_routes_and_their_fields(server: ServerThread) -> None:
    document = server.http.get("/openapi.json").json()
    for method, path in ROUTES[:-2]:
        operation = document["paths"][path.partition("?")[0]][method.lower()]
        assert operation["summary"] and {"200", "401", "503"} <= set(operation["responses"])
    schemas = document["components"]["schemas"]
    assert schemas["ChatBody"]["properties"]["temperature"]["anyOf"][0]["maximum"] == 2
    references = set(
        re.findall(r'"#/components/schemas/(\w+)"', server.http.get("/openapi.json").text)
    )
    assert references <= set(schemas), "every reference resolves"


def test_version(server: ServerThread) -> None:
    assert re.fullmatch(r"\d+\.\d+\.\d+.*", server.http.get("/version").json()["version"])
