"""How the processes of a run are prepared, started and supervised."""
