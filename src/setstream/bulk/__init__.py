"""Encoding many sets from files and tables, resumable: on this machine, or on Ray Data.

encode.py      encode_sets(model, data, out, EncodeOptions(...))
partial.py     from blocks of elements to the states of their sets
journal.py     what is done, so that a stopped run goes on
output.py      from states to rows of Parquet or HDF5
ray.py         the engine `ray`
"""
