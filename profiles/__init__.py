"""Measured numbers with their provenance, as JSON package data."""
