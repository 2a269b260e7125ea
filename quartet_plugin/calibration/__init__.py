"""What measurements say about the iteration model."""
