"""Benchmarks: run.py runs rows, rows_*.py measure them.  Nothing here is installed."""
