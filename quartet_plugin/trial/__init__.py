"""One plan, run for a few iterations: runner, watchdog, outcome, result files."""
