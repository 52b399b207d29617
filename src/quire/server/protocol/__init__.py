"""The request bodies, field by field. A value out of bounds is an error that names its field.

An optional field that is null or empty counts as not given: many clients send such values for fields that are not set.
"""
