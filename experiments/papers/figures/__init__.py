"""One experiment a file: a question, a configuration, a run, a figure, a verdict."""
