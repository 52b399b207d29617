"""Tools and reasoning: parsers and grammars for the function calls and the reasoning in a model's text."""
