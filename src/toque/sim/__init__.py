"""The engine under virtual time: the real scheduler and cache, a device that only takes time."""
