"""Outputs that must match a grammar: checking and compiling it, masks of allowed tokens."""
