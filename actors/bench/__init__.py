"""Benchmarks: each figure beside a peer's or a physical limit's, measured in the same run."""
