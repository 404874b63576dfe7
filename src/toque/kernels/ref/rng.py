"""Counter-based random numbers: the n-th number of a stream without making those before it.

Philox4x64-10 (Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", SC'11). The key is
(seed, choice) and the counter the position in the sequence, so that a token's random number depends
on nothing else: not on the batch, not on preemption, not on which engine computes it.
"""

from __future__ import annotations

_MASK = (1 << 64) - 1
_MULTIPLIER_0, _MULTIPLIER_1 = 0xD2E7470EE14C6C93, 0xCA5A826395121157
_WEYL_0, _WEYL_1 = 0x9E3779B97F4A7C15, 0xBB67AE8584CAA73B


def philox(key: tuple[int, int], counter: int) -> int:
    """The first of the four 64-bit words of block `counter`."""
    c0, c1, c2, c3 = counter & _MASK, 0, 0, 0
    k0, k1 = key[0] & _MASK, key[1] & _MASK
    for _ in range(10):
        p0, p1 = _MULTIPLIER_0 * c0, _MULTIPLIER_1 * c2
        c0, c1, c2, c3 = (p1 >> 64) ^ c1 ^ k0, p1 & _MASK, (p0 >> 64) ^ c3 ^ k1, p0 & _MASK
        k0, k1 = (k0 + _WEYL_0) & _MASK, (k1 + _WEYL_1) & _MASK
    return c0


def uniform(seed: int, choice: int, position: int) -> float:
    """A float64 in [0, 1) with 53 random bits."""
    return (philox((seed, choice), position) >> 11) * 2.0**-53
