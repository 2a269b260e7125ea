"""Tables, timelines and plots."""
