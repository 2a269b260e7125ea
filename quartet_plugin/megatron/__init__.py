"""The adapter that runs inside Megatron's processes. Importing it patches nothing."""
