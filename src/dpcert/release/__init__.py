"""What leaves the house: bundles that may be shared, and the check that anyone can make of them."""
