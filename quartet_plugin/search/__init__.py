"""The planner and the Optuna study."""
