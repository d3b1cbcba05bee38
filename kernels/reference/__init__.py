"""The reference engine: a small decoder whose answers do not depend on how its cache was filled.

It stands in for a real engine in demos and end-to-end tests. Its text means nothing; its KV bytes
and its tokens are exact, so that one wrong byte anywhere in the fabric shows as a wrong token.
"""
