"""Ray shells: pools, router, workers, placement. The only room that imports Ray."""
