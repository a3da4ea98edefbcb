"""Chapter 13: images. A vision-language model's pixels, patches and tokens, and what they take of a card."""
