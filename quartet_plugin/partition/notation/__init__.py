"""Writes homes and signatures of a partition in the notations of other systems."""
