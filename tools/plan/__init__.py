"""The memory that a run needs on its GPUs and hosts, before there are any."""
