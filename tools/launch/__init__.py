"""Starting a run on Slurm, SkyPilot, Kubernetes or Ray."""
