"""Models from the Hugging Face hub, without waiting for one that cannot be reached.

huggingface_hub does the transfers; it is imported only when there is one to do. Without a network
it would try for minutes, so a short question goes first (name resolution included). Whatever it
raises becomes a ModelError that carries the reason: the HTTP library below it, and so the types of
its errors, change from version to version.
"""

from __future__ import annotations

import os
import queue
import threading
from pathlib import Path

from toque.errors import ModelError
from toque.files.catalog import HubSource
from toque.files.progress import Meter, Progress

DEFAULT_ENDPOINT = "https://huggingface.co"
PROBE_LIMIT_S = 4.0
TRUE_WORDS = ("1", "ON", "YES", "TRUE")
# What a model folder is made of: weights, configuration, tokenizer and chat template.
WANTED = ["*.safetensors", "*.json", "*.jinja", "*.model", "*.txt"]
UNWANTED = ["*/*", "consolidated*"]  # other formats' copies of the same weights


def endpoint() -> str:
    """Where the hub is: HF_ENDPOINT names a mirror."""
    return (os.environ.get("HF_ENDPOINT") or DEFAULT_ENDPOINT).rstrip("/")


def why_unreachable() -> str | None:
    """None if the hub answers; else the reason, within PROBE_LIMIT_S seconds."""
    for variable in ("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE"):
        if os.environ.get(variable, "").upper() in TRUE_WORDS:
            return f"{variable} is set"
    answers: queue.SimpleQueue[str | None] = queue.SimpleQueue()
    # In a thread because name resolution knows no time limit of its own.
    threading.Thread(target=lambda: answers.put(_probe(endpoint())), daemon=True).start()
    try:
        return answers.get(timeout=PROBE_LIMIT_S)
    except queue.Empty:
        return f"{endpoint()} does not answer within {PROBE_LIMIT_S:.0f} s"


def _probe(url: str) -> str | None:
    import ssl
    from http.client import HTTPException
    from urllib.error import HTTPError, URLError
    from urllib.request import Request, urlopen

    try:
        with urlopen(Request(url, method="HEAD"), timeout=PROBE_LIMIT_S):
            return None
    except HTTPError as error:
        error.close()
        return f"{url} answers {error.code}" if error.code >= 500 else None
    except URLError as error:
        # huggingface_hub brings certificates of its own: let it judge.
        return None if isinstance(error.reason, ssl.SSLError) else f"{url}: {error.reason}"
    except (OSError, ValueError, HTTPException) as error:
        return f"{url}: {error}"


def fetch_file(source: HubSource, file: str, folder: Path, meter: Meter) -> Path:
    """Download one file into `folder`; an interrupted download is resumed there.

    Raises ModelError if the hub cannot be reached or does not have the file.
    """
    if reason := why_unreachable():
        raise ModelError(reason)
    folder.mkdir(parents=True, exist_ok=True)
    with meter.watch(folder):
        return _download(source.repo, file, source.revision, folder)


def fetch_repo(repo: str, file: str | None, progress: Progress | None) -> Path:
    """A model repository in the hub's own cache: a .gguf file, or a folder of safetensors.

    Without a network, what the cache holds is used. Raises ModelError if there is no such
    repository or file, if it is not clear which file is the model, or if nothing is cached.
    """
    reason = why_unreachable()
    if progress is None:
        _hide_bars()
    if reason:
        return _cached(repo, file, reason)
    if file:
        return _download(repo, file)
    files = _list_files(repo)
    if any(name.endswith(".safetensors") and "/" not in name for name in files):
        return _snapshot(repo)
    return _download(repo, _only_gguf(repo, files))


def _only_gguf(repo: str, files: list[str]) -> str:
    found = [name for name in files if name.endswith(".gguf")]
    if len(found) == 1:
        return found[0]
    if found:
        raise ModelError(
            f"{repo}: {len(found)} .gguf files; name one, e.g. {repo}:{found[0]} "
            f"(there are {', '.join(found)})"
        )
    raise ModelError(
        f"{repo}: no .safetensors and no .gguf file in this repository (pickle checkpoints are "
        "not loaded, because loading one runs the code in it)"
    )


def _cached(repo: str, file: str | None, reason: str) -> Path:
    import huggingface_hub

    try:
        if file:
            return Path(huggingface_hub.hf_hub_download(repo, file, local_files_only=True))
        found = huggingface_hub.snapshot_download(
            repo, allow_patterns=WANTED, ignore_patterns=UNWANTED, local_files_only=True
        )
        return Path(str(found))
    except (OSError, ValueError) as error:
        raise ModelError(
            f"{repo}: the hub cannot be reached ({reason}) and its cache does not hold this model"
        ) from error


def _download(
    repo: str, file: str, revision: str | None = None, folder: Path | None = None
) -> Path:
    import huggingface_hub

    if folder:
        _hide_bars()
    try:
        found = huggingface_hub.hf_hub_download(
            repo, file, revision=revision, local_dir=folder, endpoint=endpoint()
        )
    except Exception as error:
        raise _refusal(f"{repo}: {file}", error) from error
    return Path(found)


def _snapshot(repo: str) -> Path:
    import huggingface_hub

    try:
        found = huggingface_hub.snapshot_download(
            repo, allow_patterns=WANTED, ignore_patterns=UNWANTED, endpoint=endpoint()
        )
    except Exception as error:
        raise _refusal(repo, error) from error
    return Path(str(found))


def _list_files(repo: str) -> list[str]:
    import huggingface_hub

    try:
        return list(huggingface_hub.HfApi(endpoint=endpoint()).list_repo_files(repo))
    except Exception as error:
        raise _refusal(repo, error) from error


def _refusal(what: str, error: Exception) -> ModelError:
    lines = [line for line in str(error).splitlines() if line.strip()]
    return ModelError(f"{what}: {type(error).__name__}: {lines[0] if lines else 'no reason given'}")


def _hide_bars() -> None:
    from huggingface_hub.utils.tqdm import disable_progress_bars

    disable_progress_bars()
