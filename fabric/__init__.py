"""The vocabulary of the fabric: types, keys, layouts, formats, errors. No input or output here."""
