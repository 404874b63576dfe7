"""Which class of service a call has: its own word, else its key's, else the server's default.

Owns: nothing. Knows: the classes that Hello names, the header. Does not know: promises.
"""

from __future__ import annotations

from starlette.requests import Request

from toque.errors import ConfigError, RequestError
from toque.serve.failures import short
from toque.serve.keys import Key, key_of
from toque.slo import DEFAULT_CLASS
from toque.types import Hello, Slo

HEADER = "x-slo-class"


def slo_of(request: Request, named: str | None, hello: Hello) -> Slo | None:
    """`named` is the body's field `slo`; the header is for clients that cannot add fields.

    Raises RequestError for a class that is not defined, or two different ones.
    """
    classes = {slo.name: slo for slo in hello.slo_classes}
    in_header = request.headers.get(HEADER)
    if named is not None and in_header is not None and named != in_header:
        raise RequestError(
            f"'slo' is '{short(named)}' and the header {HEADER} '{short(in_header)}'", "slo"
        )
    asked = in_header if named is None else named
    if asked is None:
        key = key_of(request.scope)
        default = DEFAULT_CLASS if key is None or key.slo is None else key.slo
        return classes.get(default)
    if not classes:
        raise RequestError("'slo' is not supported: this server has no classes (--slo)", "slo")
    if asked not in classes:
        raise RequestError(
            f"'slo' is '{short(asked)}'; the classes here are {', '.join(classes)}", "slo"
        )
    return classes[asked]


def check_key_classes(keys: tuple[Key, ...], hello: Hello) -> None:
    """Raises ConfigError for a key whose class of service does not exist."""
    names = {slo.name for slo in hello.slo_classes}
    for key in keys:
        if key.slo is not None and key.slo not in names:
            raise ConfigError(
                f"an API key has slo={key.slo}: classes are {', '.join(sorted(names)) or 'none'}"
            )
