"""What the course and the instrument claim of a card, as small programs that run on a card and on the virtual one."""
