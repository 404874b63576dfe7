"""Measuring tools that run from a checkout: `python -m bench.load`, `.compare`, `.ops`, `.quality`.

Not part of the package. docs/benchmarks.md says how to repeat each measurement. Every tool prints a
table for people on standard error and one JSON line for scripts on standard output.
"""
