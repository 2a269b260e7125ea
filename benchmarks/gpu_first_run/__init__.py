"""The first run on a GPU: `python -m benchmarks.gpu_first_run`, from the repository's folder."""
