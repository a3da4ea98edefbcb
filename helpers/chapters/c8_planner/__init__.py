"""Chapter 8: Fit your GPU."""
