"""Training on windows that another stack recorded."""
