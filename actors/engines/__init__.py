"""Connectors for engines. They import without Ray."""
