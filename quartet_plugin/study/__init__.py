"""The Optuna study: storage, samplers and records."""
