"""Keys, TLS, slow senders, large heads: what stands before the routes."""

from __future__ import annotations

import shutil
import socket
import ssl
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.serve.fakes import FakeEngine, ServerThread, error_of, serving, wait_for
from toque.errors import ConfigError
from toque.serve.dashboard import PAGE_PATHS
from toque.serve.keys import keys_in_file, needed_scope, parse_keys

ALL, INFER, WATCH = "key-for-all", "key-infer-only", "key-watch-only"


@pytest.fixture(scope="module")
def server() -> Iterator[ServerThread]:
    keys = (ALL, f"{INFER}:inference", f"{WATCH}:metrics", "with:colon:inference,metrics")
    with serving(api_key=keys) as server:
        yield server


def bearer(key: str) -> dict[str, str]:
    return {"authorization": f"Bearer {key}"}


def every_route(server: ServerThread) -> set[tuple[str, str]]:
    """(method, path) of the route table itself, so that a new route cannot be forgotten."""
    app: Any = server.server.app
    while not hasattr(app, "routes"):
        app = app._app
    found = set()
    routes = list(app.routes)
    while routes:
        route = routes.pop()
        if not hasattr(route, "path"):  # an included router
            routes += route.original_router.routes
            continue
        path = route.path.replace("{name:path}", "fake")
        found |= {(method, path) for method in route.methods or ()}
    assert ("POST", "/v1/completions") in found and ("GET", "/openapi.json") in found
    return found


def test_every_route_needs_a_key_but_health_and_ready(server: ServerThread) -> None:
    """And the page's files, which hold nothing of this server."""
    for method, path in sorted(every_route(server)):
        answer = server.http.request(method, path, json={} if method == "POST" else None)
        if path in ("/health", "/ready", *PAGE_PATHS):
            assert answer.status_code == 200, path
        else:
            assert answer.status_code == 401, (method, path)
            assert answer.headers["www-authenticate"] == "Bearer"
            if method != "HEAD":
                assert error_of(answer)["code"] == "invalid_api_key"
        with server.http.stream(
            method, path, json={} if method == "POST" else None, headers=bearer(ALL)
        ) as with_key:  # not read to its end: the page's events have none
            assert with_key.status_code not in (401, 403), (method, path)


@pytest.mark.parametrize(
    "target",
    [
        "/v1//completions", "/V1/completions", "/v1/./models", "/%76%31/models", "/v1/models/",
        "/health/../v1/models", "/health/%2e%2e/v1/models", "//v1/models", "/health;/v1/models",
        "/health?x=/v1/models", "/v1/models?/health", "/health/", "/health%00", "/x",
        "/invocations", "/v1/messages", "/v1/embeddings", "http://x/v1/models",
    ],
)  # fmt: skip
def test_no_spelling_of_a_path_gets_by(server: ServerThread, target: str) -> None:
    for method in ("GET", "POST"):
        status, body = raw_request(server, f"{method} {target} HTTP/1.1\r\nhost: localhost\r\n")
        # The only open paths are two; a query does not make another one of them.
        if target.startswith("/health?"):
            assert status in (200, 405)
        else:
            assert status in (400, 401, 404), (target, status, body)
        assert b'"data"' not in body


def raw_request(server: ServerThread, head: str) -> tuple[int, bytes]:
    with socket.create_connection(("127.0.0.1", server.port), timeout=60) as sock:
        sock.sendall((head + "connection: close\r\ncontent-length: 0\r\n\r\n").encode("latin-1"))
        answer = b""
        while part := sock.recv(65536):
            answer += part
    return int(answer.split(b" ", 2)[1]), answer


@pytest.mark.parametrize(
    "header",
    ["", "Bearer", "Bearer ", "Basic x", f"Basic {ALL}", ALL, "Bearer \u00e9",
     "Bearer " + "A" * 9000, f"Bearer {ALL}x", f"Bearer {ALL[:-1]}", f"Bearer {ALL.upper()}",
     f"Bearer {ALL},", "Bearer \t"],
)  # fmt: skip
def test_wrong_keys_are_401(server: ServerThread, header: str) -> None:
    line = f"authorization: {header}\r\n"
    get = "GET /v1/models HTTP/1.1\r\nhost: localhost\r\n"
    status, body = raw_request(server, get + line)
    assert status == 401 and b'"authentication_error"' in body
    assert raw_request(server, get + f"authorization: Bearer {ALL}\r\n" + line)[0] == 401


def test_the_scheme_s_case_does_not_matter(server: ServerThread) -> None:
    for scheme in ("bearer", "BEARER", "Bearer "):
        headers = {"authorization": f"{scheme} {ALL}"}
        assert server.http.get("/v1/models", headers=headers).status_code == 200


@pytest.mark.parametrize(
    ("path", "key", "status"),
    [
        ("/v1/models", INFER, 200), ("/metrics", INFER, 403), ("/load", INFER, 403),
        ("/v1/models", WATCH, 403), ("/metrics", WATCH, 200), ("/load", WATCH, 200),
        ("/version", WATCH, 200), ("/version", INFER, 200), ("/nowhere", WATCH, 403),
        ("/nowhere", INFER, 404), ("/metrics", "with:colon", 200),
        ("/v1/models", "with:colon", 200),
    ],
)  # fmt: skip
def test_scopes(server: ServerThread, path: str, key: str, status: int) -> None:
    answer = server.http.get(path, headers=bearer(key))
    assert answer.status_code == status
    if status == 403:
        assert error_of(answer)["code"] == "insufficient_scope"


def test_keys_come_from_the_environment_and_from_a_file_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "keys"
    path.write_text("# ours\nfrom-the-file\n\n")
    monkeypatch.setenv("TOQUE_API_KEY", "from-the-env also-from-env:metrics")
    with serving(api_key=("from-a-flag",), api_key_file=str(path)) as server:
        for key in ("from-the-file", "from-the-env", "from-a-flag"):
            assert server.http.get("/v1/models", headers=bearer(key)).status_code == 200
        assert server.http.get("/v1/models", headers=bearer("also-from-env")).status_code == 403
        assert server.http.get("/v1/models").status_code == 401


def test_keys_that_protect_nothing_are_refused_at_start(tmp_path: Path) -> None:
    empty = tmp_path / "empty"
    empty.write_text("# nothing\n")
    for wrong in ("short", "long-enough-key:metrix", "long-enough-key:", ":inference"):
        with pytest.raises(ConfigError):
            parse_keys([wrong])
    for path in (str(empty), str(tmp_path / "none")):
        with pytest.raises(ConfigError):
            keys_in_file(path)
    assert needed_scope("/anything/else") == "inference"


def test_a_key_is_checked_before_the_body_is_read(server: ServerThread) -> None:
    head = "POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ncontent-length: 1000000\r\n\r\n"
    with socket.create_connection(("127.0.0.1", server.port), timeout=60) as sock:
        sock.sendall(head.encode())
        assert b" 401 " in sock.recv(100)


# ----------------------------------------------------------------------------- slow and large


@pytest.mark.parametrize(
    "begin",
    [b"", b"POST /v1/comp", b"GET /health HTTP/1.1\r\nhost: x\r\nx: ",
     b"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ncontent-length: 99\r\n\r\n{"],
)  # fmt: skip
def test_a_request_that_does_not_arrive_is_cut(begin: bytes) -> None:
    with serving(read_timeout=1.0) as server:
        with socket.create_connection(("127.0.0.1", server.port), timeout=60) as sock:
            sock.sendall(begin)
            try:
                for _ in range(3000):  # a drip does not buy time
                    sock.sendall(b"a" if begin else b"")
                    time.sleep(0.02)
                    if not begin:
                        assert sock.recv(100) == b""
                        break
                assert sock.recv(100) in (b"",)
            except ConnectionError:
                pass
        text = server.http.get("/metrics").text
        assert "toque_slow_senders_total 1.0" in text


def test_an_idle_or_busy_connection_is_not_a_slow_one() -> None:
    """Between two requests, and while its answer takes long, a connection is at rest."""
    engine = FakeEngine(step_s=0.3)
    with serving(engine, read_timeout=1.0) as server:
        with httpx.Client(base_url=server.url, timeout=60) as client:
            for _ in range(2):
                body = {"prompt": "x", "max_tokens": 5}
                assert client.post("/v1/completions", json=body).status_code == 200
                time.sleep(1.3)
        assert "toque_slow_senders_total 0.0" in server.http.get("/metrics").text


def test_a_head_without_end_is_431(server: ServerThread) -> None:
    with socket.create_connection(("127.0.0.1", server.port), timeout=60) as sock:
        sock.sendall(b"GET /health HTTP/1.1\r\nHost: x\r\nX: ")
        answer = b""
        try:
            for _ in range(64):
                sock.sendall(b"a" * 65536)
            answer = sock.recv(1000)
        except ConnectionError:
            pass
    assert answer == b"" or b" 431 " in answer
    assert server.http.get("/health").status_code == 200
    assert server.http.get("/health", headers={"x": "a" * 30_000}).status_code == 200


# ------------------------------------------------------------------------------------- TLS


@pytest.fixture(scope="module")
def certificate(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, str]:
    if shutil.which("openssl") is None:
        pytest.skip("openssl is not installed: no certificate to test with")
    folder = tmp_path_factory.mktemp("tls")
    cert, key = str(folder / "cert.pem"), str(folder / "key.pem")
    subprocess.run(
        ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256",
         "-nodes", "-keyout", key, "-out", cert, "-days", "2", "-subj", "/CN=localhost",
         "-addext", "subjectAltName=DNS:localhost,IP:127.0.0.1"],
        check=True, capture_output=True,
    )  # fmt: skip
    return cert, key


def test_https_streams_and_refuses_plain_http(certificate: tuple[str, str]) -> None:
    cert, key = certificate
    with serving(ssl_certfile=cert, ssl_keyfile=key, ready=False) as server:
        context = ssl.create_default_context(cafile=cert)
        with httpx.Client(base_url=f"https://localhost:{server.port}", verify=context) as client:
            wait_for(lambda: client.get("/ready").status_code == 200)
            body = {"prompt": "x", "stream": True}
            answer = client.post("/v1/completions", json=body)
            assert answer.text.endswith("data: [DONE]\n\n")
        with pytest.raises(httpx.TransportError):
            server.http.get("/health")


def test_a_certificate_that_cannot_be_used_is_named_at_start(
    tmp_path: Path, certificate: tuple[str, str]
) -> None:
    from toque.commands.serve import serve
    from toque.options import EngineOptions, ServeOptions

    for options in (
        {"ssl_certfile": str(tmp_path / "none")},
        {"ssl_keyfile": certificate[1]},
        {"ssl_certfile": certificate[1]},
    ):
        with pytest.raises(ConfigError):
            serve("smollm2", EngineOptions(), ServeOptions(port=0, **options))


# ------------------------------------------------------------------------------- small routes


def test_operators_routes(server: ServerThread) -> None:
    http, headers = server.http, bearer(ALL)
    for path in ("/health", "/ready"):
        head = http.head(path)
        assert head.status_code == 200 and head.content == b""
    for method in ("GET", "POST"):
        assert http.request(method, "/ping", headers=headers).status_code == 200
    load = http.get("/load", headers=headers).json()
    assert load["server_load"] == 0
    assert load["free_pages"] + load["cached_pages"] + load["held_pages"] == load["total_pages"]
    card = http.get("/v1/models/fake", headers=headers).json()
    assert card == http.get("/v1/models", headers=headers).json()["data"][0]
    missing = http.get("/v1/models/org/other", headers=headers)
    assert missing.status_code == 404 and error_of(missing)["code"] == "model_not_found"


def test_the_loop_s_delay_is_measured(server: ServerThread) -> None:
    text = server.http.get("/metrics", headers=bearer(ALL)).text
    assert "toque_event_loop_delay_seconds_count" in text
    assert 'route="/v1/models/{name}"' in text or 'route="/v1/models"' in text
