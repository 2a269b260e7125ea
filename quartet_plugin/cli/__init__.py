"""The `quartet` command: one module a command; parses, calls, prints."""
