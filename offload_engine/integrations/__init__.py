"""Adapters for training loops of other libraries. Each imports its library, and is imported by nobody here."""
