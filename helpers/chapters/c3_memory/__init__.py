"""Chapter 3: What fills the memory."""
