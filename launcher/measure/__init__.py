"""Measure a running service: whether its replies are right, and how fast they come."""
