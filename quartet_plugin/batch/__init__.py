"""Many tuning runs from one file: a queue of jobs that share measurements, and their results."""
