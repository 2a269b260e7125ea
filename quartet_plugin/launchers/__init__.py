"""How the processes of a trial start."""
