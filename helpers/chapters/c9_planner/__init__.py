"""Chapter 9: Fit your GPU."""
