"""The trace of a run: every request and release in order, and what is read off it."""
