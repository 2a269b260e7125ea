"""The cost model: the predicted time and memory of an iteration."""
