"""Many tuning runs by one file: a queue of jobs that share what was measured, and their results."""
