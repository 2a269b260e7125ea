"""The tuning loop: baseline, trials, parity gate, drift, final rounds."""
