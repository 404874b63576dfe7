"""Measurements that anyone can repeat: each prints a table for people and one JSON line."""
