"""Layers ranked for a task by a score, and how sure their order is."""
