"""Tests of the router of several models."""
