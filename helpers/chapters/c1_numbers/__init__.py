"""Chapter 1: Number formats."""
