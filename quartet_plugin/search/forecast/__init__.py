"""What every plan of a space is likely to take: the cost model, corrected by each trial that was told."""
