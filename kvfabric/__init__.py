"""kvfabric: one KV cache for a fleet of LLM engines on a Ray cluster."""

__version__ = "0.0.1"
