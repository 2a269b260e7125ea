"""What a trial server imports for the tests' own ranks."""
