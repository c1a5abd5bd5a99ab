"""The pages of docs/reference: a module makes one page, from the code that it describes."""
