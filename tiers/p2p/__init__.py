"""Peers: how one node's pool pulls chunks from the host memory of another.

`source` is the serving side, `consumer` the pulling side; both are pure. `transport` is the
contract of what moves the bytes, `nixl` one such, and `reads` carries out the consumer's reads with
it.
"""
