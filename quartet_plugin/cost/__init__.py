"""What an iteration costs, before it is measured."""
