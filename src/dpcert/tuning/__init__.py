"""A search over settings on a validation split, with or without a charge for the search."""
