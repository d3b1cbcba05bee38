"""What a run of the demo is when nobody says otherwise. Imports nothing, for the command line."""

SCALE = 0.0625
"""12K-token prompts become 768 tokens, which one CPU core prefills in 0.13 s (measured)."""
TRACE_REQUESTS = 100
CONVERSATIONS = 4
TURNS = 8
"""As in the published multi-turn workload."""
OUTPUT_TOKENS_MAX = 48
CHUNK_TOKENS = 32
BLOCK_TOKENS = 16
WORKERS = 2
"""Of each kind, so that a node's engines are seen to share its pool."""
