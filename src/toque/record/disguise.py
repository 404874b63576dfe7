"""Requests whose words cannot be read back, and whose shared beginnings are still shared.

Owns: a secret that is thrown away with it; the state of each open request's disguise.
Knows: requests, tokens. Does not know: files.

A token is replaced by a keyed hash of all tokens up to and including it. So two requests have the
same first tokens after it exactly if they had before (two hashes of 48 bits are equal once in
10^14), and a token that occurs often looks different each time. The hash goes on through the
output: a conversation's next turn continues what was said.

Hidden tokens have numbers of their own, above the vocabulary: so none is taken for a token that
ends a sequence, whichever those are for the request that meets it. The token that did end an output
stays what it is. What is no token at all stays none: the engine refuses it both times.
"""

from __future__ import annotations

import secrets
from dataclasses import dataclass
from hashlib import blake2b

from msgspec import structs

from toque.types import Request, SamplingParams, TokenId

_STATE_BYTES = 8
_HIDDEN_BITS = 48
HIDDEN_VOCAB = 1 << (_HIDDEN_BITS + 1)  # hidden tokens are below, if the vocabulary is below half
# What the scheduler reads of the sampling parameters; the rest could tell words.
_KEPT = ("max_tokens", "min_tokens", "ignore_eos", "stop_token_ids", "prompt_logprobs", "seed")


@dataclass(slots=True)
class _Open:
    state: bytes
    ends: frozenset[TokenId]


class Disguise:
    def __init__(self, vocab_size: int, end_token_ids: tuple[TokenId, ...]) -> None:
        self._key = secrets.token_bytes(32)
        self._vocab_size = vocab_size
        self._end_ids = frozenset(end_token_ids)
        self._open: dict[str, _Open] = {}

    def request(self, request: Request) -> Request:
        """The request as it is recorded; its output is disguised until `forget`."""
        sampling = request.sampling
        ends = frozenset(sampling.stop_token_ids)
        ends = ends if sampling.ignore_eos else ends | self._end_ids
        root = self._hash(request.cache_salt.encode("utf-8", "surrogatepass"))
        entry = self._open[request.id] = _Open(root, ends)
        kept = {name: getattr(sampling, name) for name in _KEPT}
        return structs.replace(
            request,
            prompt=tuple(self._next(entry, token) for token in request.prompt),
            output=tuple(self._next(entry, token) for token in request.output),
            sampling=SamplingParams(**kept),
            cache_salt=root.hex() if request.cache_salt else "",
            grammar=None,
            thinking=None,
        )

    def output(self, request_id: str, token: TokenId) -> TokenId:
        """A sampled token. Of a request that has ended: itself, it has no meaning any more."""
        entry = self._open.get(request_id)
        return token if entry is None or token in entry.ends else self._next(entry, token)

    def forget(self, request_id: str) -> None:
        self._open.pop(request_id, None)

    def _next(self, entry: _Open, token: TokenId) -> TokenId:
        entry.state = self._hash(entry.state + token.to_bytes(8, "little", signed=True))
        if not 0 <= token < self._vocab_size:
            return -1
        return self._vocab_size + (int.from_bytes(entry.state, "little") >> (64 - _HIDDEN_BITS))

    def _hash(self, data: bytes) -> bytes:
        return blake2b(data, digest_size=_STATE_BYTES, key=self._key).digest()
