"""Encoding many sets from files and tables, resumable: on this machine, or on Ray Data."""
