"""Running a program without data and counting what it would hold."""
