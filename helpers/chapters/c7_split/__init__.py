"""Chapter 7: splitting the model."""
