"""The levers that people pull against running out of memory, each as a change of one program."""
