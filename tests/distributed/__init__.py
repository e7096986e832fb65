"""Tests of several ranks: processes with gloo between them."""
