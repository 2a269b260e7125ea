"""Tests that other packages run on what they add: subclass them in a test module of your own."""
