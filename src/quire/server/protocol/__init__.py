"""What clients may ask for, field by field. An unknown field, or one out of bounds, is an error that names it.

An optional field that is null or empty counts as not given: many clients send such values for what was not set.
"""
