"""Run by test_fetch: a server that answers as the hub does, and what `locate` makes of it.

A program of its own because huggingface_hub reads its environment when it is imported.
"""

from __future__ import annotations

import hashlib
import json
import os
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

COMMIT = "1" * 40
TINY = bytes(range(256)) * 64
REPOS: dict[str, dict[str, bytes]] = {
    "test/tiny": {"tiny.gguf": TINY},
    "test/folder": {
        "config.json": b"{}",
        "model.safetensors": b"weights",
        "tokenizer.json": b"{ }",
        "consolidated.safetensors": b"a copy",
        "onnx/model.json": b"another format",
        "pytorch_model.bin": b"pickle",
    },
    "test/one": {"only.gguf": b"only", "README.md": b"read"},
    "test/two": {"a.gguf": b"aa", "b.gguf": b"bb"},
}


class Hub(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def do_HEAD(self) -> None:
        self._answer(with_body=False)

    def do_GET(self) -> None:
        self._answer(with_body=True)

    def _answer(self, with_body: bool) -> None:
        path = self.path.split("?")[0].strip("/")
        parts = path.split("/")
        if not path:
            return self._send(200, b"", with_body)
        if parts[0] == "api":
            return self._answer_api("/".join(parts[2:4]), parts[4:], with_body)
        files = REPOS.get("/".join(parts[:2]), {})
        content = files.get("/".join(parts[4:]))
        if content is None:
            return self._send(404, b"", with_body)
        etag = hashlib.sha256(content).hexdigest()
        return self._send(200, content, with_body, {"ETag": f'"{etag}"', "X-Repo-Commit": COMMIT})

    def _answer_api(self, repo: str, rest: list[str], with_body: bool) -> None:
        if repo not in REPOS:
            return self._send(404, b"{}", with_body, {"X-Error-Code": "RepoNotFound"})
        files = REPOS[repo]
        if rest[:1] == ["tree"]:
            tree = [
                {"type": "file", "path": name, "size": len(content), "oid": "2" * 40}
                for name, content in files.items()
            ]
            return self._send(200, json.dumps(tree).encode(), with_body)
        info = {"id": repo, "sha": COMMIT, "siblings": [{"rfilename": name} for name in files]}
        return self._send(200, json.dumps(info).encode(), with_body)

    def _send(
        self, status: int, body: bytes, with_body: bool, headers: dict[str, str] | None = None
    ) -> None:
        self.send_response(status)
        for name, value in (headers or {}).items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if with_body:
            self.wfile.write(body)

    def log_message(self, *_: Any) -> None:
        pass


def main() -> None:
    server = ThreadingHTTPServer(("127.0.0.1", 0), Hub)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    os.environ["HF_ENDPOINT"] = f"http://127.0.0.1:{server.server_port}"

    from toque.errors import ModelError
    from toque.files.catalog import CatalogEntry, HubSource
    from toque.files.fetch import fetch_entry, locate

    def failure(model: str) -> str:
        try:
            return f"found {locate(model)}"
        except ModelError as error:
            return str(error)

    def names(path: Path) -> list[str]:
        return sorted(entry.name for entry in path.iterdir())

    entry = CatalogEntry(
        name="tiny",
        aliases=(),
        file="tiny.gguf",
        size_bytes=len(TINY),
        sha256=hashlib.sha256(TINY).hexdigest(),
        license="Apache-2.0",
        sources=(HubSource(repo="test/tiny", revision=COMMIT),),
    )
    tiny = fetch_entry(entry)
    result: dict[str, Any] = {
        "catalogue": tiny.name,
        "left in its folder": names(tiny.parent),
        "folder": names(locate("test/folder").path),
        "gguf": locate("test/one").path.name,
        "named gguf": locate("test/two:b.gguf").path.name,
        "several": failure("test/two"),
        "missing": failure("missing/repo"),
    }
    os.environ["HF_HUB_OFFLINE"] = "1"
    result |= {
        "offline folder": names(locate("test/folder").path),
        "offline gguf": names(locate("test/one").path),
        "offline missing": failure("missing/repo"),
    }
    print(json.dumps(result))


if __name__ == "__main__":
    main()
