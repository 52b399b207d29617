"""Batches: files of requests that are answered line by line, in order, and resumed after any interruption.

The command `quire batch` and the routes /v1/batches share all of it. A result depends on its line and on the serving
system alone, so a batch that was killed and started again writes the bytes of an undisturbed one.
"""
