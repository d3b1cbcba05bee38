"""Marks the root of the tree: tools that read it from here resolve imports between rooms."""
