"""How a tree of attempts is searched, in a run (`next_fork`) and without one."""
