"""The schedule runtime inside Megatron: its stages, process groups and seams, and the features it refuses."""
