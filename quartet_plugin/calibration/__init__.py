"""Calibration: the posterior of the cost model's constants and coefficients, given measurements."""
