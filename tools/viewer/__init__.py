"""The viewer: looks into the archive of a run, in a browser."""
