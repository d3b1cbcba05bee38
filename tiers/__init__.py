"""Where bytes live: host region, directory, tiers, peers, and the client of engines."""
