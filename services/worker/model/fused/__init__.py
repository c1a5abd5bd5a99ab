"""A model's small operations, several in one: at the few rows of a decode step calling them costs more than they do."""
