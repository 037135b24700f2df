"""One claim a file, each with its configuration, our numbers and a verdict."""
