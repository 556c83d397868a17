"""Retrieval from a user's own corpus."""

from .passages import Hit, Passage, holds_triples, read_passages

__all__ = ["Hit", "Passage", "holds_triples", "read_passages"]
