"""Who holds what, where a request runs and from whom it pulls."""
