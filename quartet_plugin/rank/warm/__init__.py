"""The trial server: a process that has made a training's imports, and forks every trial from itself."""
