"""Ranks plans under the iteration model."""
