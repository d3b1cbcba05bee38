"""The node pool: its control file and segments, and the directory of what lies in the slots.

`table` writes the control file and `reader` reads it from another process; `region` makes, adopts
and sweeps the files; `directory` decides who may write, read and reuse which slot.
"""
