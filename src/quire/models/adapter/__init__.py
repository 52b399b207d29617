"""Models without a family here: transformers' modelling code with Quire's attention."""
