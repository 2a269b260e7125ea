"""How many trials the search needs: `python -m benchmarks.search_cost record`, then `replay`."""
