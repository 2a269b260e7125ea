"""The Optuna study, which keeps the trials: storage, samplers and records."""
