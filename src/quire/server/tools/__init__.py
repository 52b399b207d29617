"""Tools and reasoning: what models write when they call a function or think, read and guaranteed."""
