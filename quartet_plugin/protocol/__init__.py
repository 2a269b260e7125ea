"""Records that the tuner and the training processes share, as files and environment variables."""
