"""Drills: a whole run on this machine under faults."""
