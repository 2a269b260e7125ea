"""What a plan may choose, and what is legal."""
