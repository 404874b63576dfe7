"""Runs step plans on a model: batches, per-row state, sampling."""
