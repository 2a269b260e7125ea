"""What tuning wins on two CPU cores, scenario by scenario; `python -m benchmarks.scenarios` runs them."""
