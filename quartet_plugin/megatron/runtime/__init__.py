"""Our runtime inside Megatron: its stages, its groups and seams, and what it refuses."""
