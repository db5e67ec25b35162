"""Reports of runs: what their directories hold, as a page with charts."""
