"""Shows runs and plans: tables, timelines and pages."""
