"""Checkpoints of integers: what their config.json says of them, and the readers of their tensors.

A format has a module: its scheme, made of `quantization_config`, knows for each linear of the model how it is stored.
The integers and scales of the file are those that are multiplied; they are only put into another order.
"""
