"""The demo: conversations played over a small cluster, with and without the fabric."""
