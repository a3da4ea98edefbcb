"""Programs that nobody here wrote, unchanged on a virtual GPU."""
