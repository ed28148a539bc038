"""From a text or a task to the windows that a model reads."""
