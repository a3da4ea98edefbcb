"""Chapter 10: from the error on the screen to the line that causes it."""
